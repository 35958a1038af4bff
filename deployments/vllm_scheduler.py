"""The path of the scheduler plug-in that people write down, for `vllm serve --scheduler-cls`."""

from deployments.engines.vllm.scheduler.plug_in import SluiceScheduler

__all__ = ["SluiceScheduler"]

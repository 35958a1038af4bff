"""NIXL's progress thread sleeps while nothing moves, on machines where engines share their cores.

nixl's Python layer makes each agent with a delay of 0, and its UCX backend then polls without a pause: a core of every
engine, idle or not (nixl 1.5.1: 1.00 of a core measured, half of it in the kernel). With a delay it sleeps until
something arrives or the delay, at least 1 ms, is over. A GPU's machine has the cores, and is left as NIXL has it.
"""

from nixl import _bindings


def sleep_between_events(delay_us: int) -> None:
    """Agents of this process made from now on. vLLM has no setting for it, nor has nixl's Python layer."""
    stock = _bindings.nixlAgentConfig

    class SleepingConfig(stock):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return int(stock.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            stock.pthrDelay.__set__(self, delay_us)

    _bindings.nixlAgentConfig = SleepingConfig

"""Policies that are simulated in order to compare with them, and never serve."""


class LeastWork:
    """Order by predicted seconds of engine time, least first. Nothing bounds how long a long request waits."""

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        return estimated_work_s

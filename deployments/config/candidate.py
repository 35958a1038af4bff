"""A new version of a model beside the old one: `more_models[].candidate`."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from deployments.config.classes import ClassSection
from deployments.config.model import ModelSection
from deployments.config.section import LiveKey, Section


class CandidateSection(Section):
    """A model that may succeed another one of the application, and gets a part of its requests until that is decided.
    Any change of this section begins the comparison anew. See docs/guides/canary.md."""

    of: str
    """The model that it may succeed, by the name that clients use."""
    share: LiveKey[float] = Field(default=0.05, ge=0, le=1)
    """The part of that model's sessions, and of its requests without one, that it answers."""
    mirror: LiveKey[bool] = False
    """It answers nobody: it gets copies of that part in a class with `fills_idle`, and what it answers is dropped."""
    decide: LiveKey[Literal["roll_back", "promote", "never"]] = "roll_back"
    """What is done by itself: `roll_back` takes its part away once it is worse, `promote` does so and gives it all
    requests once it is no worse; `never` only tells the verdict."""


class MoreModelSection(ModelSection):
    """A further model. `model`, `served_model_name`, `vllm_args`, `engine` and `work` are its own, as the first model
    has them at the top; everything else is shared."""

    candidate: CandidateSection | None = None
    """What makes it a candidate; null leaves it to those who name it."""


def check_candidates(
    first: ModelSection, more: Sequence[MoreModelSection], classes: Mapping[str, ClassSection]
) -> None:
    """Raises ValueError for what cannot be compared."""
    names = [section.public_name for section in (first, *more)]
    candidates = {section.public_name: section.candidate for section in more if section.candidate is not None}
    shares: defaultdict[str, float] = defaultdict(float)
    for name, candidate in candidates.items():
        at = f"candidate.of of {name} is {candidate.of}"
        if candidate.of == name:
            raise ValueError(f"{at}: it is no candidate of itself; name the model that it may succeed")
        if candidate.of not in names:
            raise ValueError(f"{at}, which is no model here; there are {names}")
        if candidate.of in candidates:
            raise ValueError(f"{at}, which is a candidate itself: name the model that both may succeed")
        if candidate.mirror and idle_class(classes) is None:
            raise ValueError(f"candidate.mirror of {name} sends copies in a class with fills_idle: true; there is none")
        shares[candidate.of] += candidate.share
    for name, share in shares.items():
        if share > 1:
            raise ValueError(f"candidate.share of all candidates of {name} is {share:g} together, and 1 is the most")


def idle_class(classes: Mapping[str, ClassSection]) -> str | None:
    """The class of copies: of those that fill idle capacity the one whose first token is due last."""
    idle = {name: section.ttft_s for name, section in classes.items() if section.fills_idle}
    return max(idle, key=lambda name: (idle[name] is None, idle[name] or 0.0, name), default=None)

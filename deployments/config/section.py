"""The base of every section of the configuration, and the marker of its live keys."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from deployments.config.reference import LIVE

T = TypeVar("T")
LiveKey = Annotated[T, Field(json_schema_extra={LIVE: True})]
"""A setting that changes while engines serve (deployments/config/live.py); a change of any other restarts them."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Refuses what it does not know; its errors do not show what was given, which may hold a password."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)

    @classmethod
    def live_keys(cls) -> set[str]:
        extras = {name: field.json_schema_extra for name, field in cls.model_fields.items()}
        return {name for name, extra in extras.items() if isinstance(extra, dict) and LIVE in extra}

    @classmethod
    def fixed_keys(cls) -> list[str]:
        """Those whose change restarts what runs."""
        return sorted(cls.model_fields.keys() - cls.live_keys())

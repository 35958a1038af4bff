"""What every section of the configuration is."""

from collections.abc import Container
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from deployments.config.reference import AllBut

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Refuses what it does not know; its errors do not show what was given, which may hold a password.

    FIXED: fields whose change restarts engines; deployments/config/live.py changes the others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)
    FIXED: ClassVar[Container[str]] = AllBut()

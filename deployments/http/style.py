"""How the page at `/` looks, and the reports of `sluice simulate` and `sluice plan` with it."""

from importlib.resources import files

STYLE = files("deployments.http").joinpath("style.css").read_text()

"""Reports of `sluice simulate` and `sluice plan`, as a person sees them in a browser."""

import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from deployments.command import cli
from simulator.charts import svg
from simulator.curves import Curve
from simulator.run_page import distribution
from tests.integration.browser import opened

pytestmark = pytest.mark.long

WICKED = "<img src=http://192.0.2.1/x.png>"
PHONE = 390
DARK = "rgb(16, 21, 28)"


def run(*argv: str) -> None:
    options = cli.parse(argv)
    options.run(options)


def asked(folder: Path) -> tuple[str, ...]:
    targets = ("--target", "chat:0.5:0.03", "--target", f"{WICKED}:10:0.2")
    written = ("--html", str(folder / "report.html"))
    return ("--trace", str(folder / "mine.csv"), "--seed", "7", "--slots", "48", *targets, *written)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two classes, one with a name that a careless page would take for a picture elsewhere."""
    folder = tmp_path_factory.mktemp("simulated")
    rows = [f"{0.1 * n},{200 + n},{20 + n},{'chat' if n % 2 else WICKED}" for n in range(80)]
    (folder / "mine.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,slo_class", *rows]))
    run("simulate", *asked(folder))
    return folder / "report.html"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    report = tmp_path_factory.mktemp("planned") / "report.html"
    engine = "Llama-3.1-8B@h100_sxm"
    tried = ("--engine", engine, "--price", f"{engine}=2.5", "--replicas", "1,2", "--all", "--systems", "stock,sluice")
    given = ("--requests", "30", "--arrivals", "poisson:20", "--target", "*:10:1", "--load", "1,2")
    run("plan", *tried, *given, "--processes", "1", "--html", str(report))
    return report


def told(page: Page, chart: int) -> str:
    """What stands beside the pointer in the middle of a chart."""
    figure = page.locator(".chart").nth(chart)
    expect(figure.locator(".tip")).to_be_hidden()
    figure.locator("> svg").hover()
    expect(figure.locator(".tip")).to_be_visible()
    tip, here = (figure.locator(each).bounding_box() for each in (".tip", ".here"))
    assert tip is not None and here is not None
    apart = max(here["y"] - tip["y"] - tip["height"], tip["y"] - here["y"] - here["height"])
    assert 0 <= apart < 10, "it stands beside its point and hides no part of it"
    return figure.locator(".tip").inner_text()


def test_a_simulation_says_what_went_in(simulated: Path) -> None:
    with opened(simulated.as_uri()) as page:
        given = page.locator("section", has_text="What went in")
        for each in (
            f"80 of {simulated.parent / 'mine.csv'}",
            "first token within 0.5 s, then 0.03 s a token",
            "noise:0.44",
            "soonest_first_token",
            "tokens on the mean",
            "requests/s",
            f"--seed 7 --slots 48 --target chat:0.5:0.03 --target '{WICKED}:10:0.2' --html {simulated}",
        ):
            expect(given).to_contain_text(each)
        expect(given.get_by_role("row", name="seed")).to_contain_text("7")
        expect(given.get_by_role("row", name="slots")).to_contain_text("48")
        expect(given.get_by_role("row", name="KV cache")).to_contain_text("tokens")


def test_each_class_has_a_curve_and_its_target_in_one_colour(simulated: Path) -> None:
    with opened(simulated.as_uri()) as page:
        first = page.locator(".chart").first
        colours = [
            first.locator(f"> svg .{kind}").evaluate_all("found => found.map(each => getComputedStyle(each).stroke)")
            for kind in ("line", "mark")
        ]
        assert len(set(colours[0])) == 2 and colours[0] == colours[1]
        expect(first.locator(".legend")).to_contain_text("target of chat: 500 ms")
        expect(page.locator(".chart").nth(2).locator("> svg .mark")).to_have_count(0)


def test_the_pointer_is_told_the_value_of_the_curve_below_it(simulated: Path) -> None:
    with opened(simulated.as_uri()) as page:
        shown = re.fullmatch(r"(.+): ([\d.]+)% within ([\d.]+) (ms|s)", told(page, 0))
        assert shown and shown[1] in ("chat", WICKED)
        assert 0 < float(shown[2]) <= 100


def test_a_plan_says_what_went_in_and_what_each_point_cost(planned: Path) -> None:
    with opened(planned.as_uri()) as page:
        given = page.locator("section", has_text="What went in")
        expect(given.get_by_role("row", name="price a replica")).to_contain_text("2.5")
        expect(given.get_by_role("row", name="good enough")).to_contain_text("95.0% of every class")
        expect(given).to_contain_text("sluice plan --engine Llama-3.1-8B@h100_sxm --price")
        expect(page.locator("tr.best")).to_have_count(2)
        expect(page.locator("section").first).to_contain_text("deadline")
        assert re.search(r"[12] × Llama-3.1-8B@h100_sxm (stock|sluice): cost \d.*% in time", told(page, 1))
        expect(page.locator(".chart").nth(1).locator("> svg .line")).to_have_count(2)


def test_points_that_lie_on_each_other_are_told_together(planned: Path) -> None:
    with opened(planned.as_uri()) as page:
        lines = told(page, 0).splitlines()
        assert [re.search(r"(stock|sluice):", line)[1] for line in lines] == ["stock", "sluice"]  # type: ignore[index]


def test_a_report_asks_no_address(simulated: Path, planned: Path) -> None:
    for report in (simulated, planned):
        with opened(report.as_uri()) as page:
            asked = list[str]()
            page.on("request", lambda request, asked=asked: asked.append(request.url))  # type: ignore[misc]
            page.reload(wait_until="networkidle")
            assert asked == [report.as_uri()]
            expect(page.locator("img")).to_have_count(0)


def test_a_report_fits_a_phone_in_the_dark(simulated: Path, planned: Path) -> None:
    for report in (simulated, planned):
        with opened(report.as_uri(), width=PHONE, height=800, dark=True) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == DARK
            tip = page.locator(".tip").first
            page.locator(".chart > svg").first.hover()
            expect(tip).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE


def test_the_same_command_writes_the_same_bytes(simulated: Path) -> None:
    before = simulated.read_bytes()
    run("simulate", *asked(simulated.parent))
    assert simulated.read_bytes() == before


def test_a_report_is_small_however_many_requests_there_were(simulated: Path) -> None:
    assert simulated.stat().st_size < 100_000
    of_many = distribution("latency", {"*": Curve(values=np.linspace(0.01, 9.0, 100_000), came=100_000)})
    assert len(svg(of_many)) < 30_000
    assert of_many.lines[0].points[-1][:2] == (9.0, 1.0)

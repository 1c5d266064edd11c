"""The pages in a real browser, where Playwright and Chromium are installed: no errors, one host, a small screen."""

import re
import shutil
import socket
import threading

import pytest
import uvicorn

from tests.board.conftest import TOKEN, Pages
from tests.helpers.board_runs import status, train_record, write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


@pytest.fixture
def address(pages, tmp_path):
    """A board at a socket, with its port in the name of its cookie."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        board = Pages(pages.root, tmp_path / "state", port=port)
        server = uvicorn.Server(uvicorn.Config(board.app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{port}"
        board.app.state.board.is_closing = True
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser, address):
    """Returns a page of a browser with a colour scheme, which has opened the board."""
    errors, hosts = [], set()

    def opened(scheme, width=360):
        page = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}).new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(f"{address}/?token={TOKEN}")
        page.get_by_role("heading", name="Runs").wait_for()
        return page

    yield opened
    assert errors == []
    assert hosts == {address.removeprefix("http://")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_small_screen_and_are_accessible(pages, address, tab, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    page = tab(scheme)
    write_run(pages.root / "live", 30, status_json=status("training", 30, 60))
    numbers = [pages.number(name) for name in ("first", "grid/second", "live")]
    run, compared = f"/run/{numbers[0]}", "&".join(f"run={number}" for number in numbers)
    further = (f"/compare?{compared}", "/queue", f"/new?from={numbers[0]}", f"/chat?run={numbers[0]}")
    for path in ("/", run, f"{run}/data", *further):
        page.goto(address + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
        violations = axe.run(page).response["violations"]
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in violations] == [], path


def test_buttons_work_and_pages_follow_their_runs(pages, address, tab):
    page = tab("light")
    write_run(pages.root / "first", 61, status_json=status("training", 61, 90))
    page.get_by_text("61 / 90").wait_for()
    page.get_by_label("compare first").check()
    write_run(pages.root / "first", 62, status_json=status("training", 62, 90))
    page.get_by_text("62 / 90").wait_for()  # the chosen run stays chosen
    page.get_by_label("compare grid/second").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="2 runs compared").wait_for()
    page.goto(f"{address}/run/{pages.number('first')}")
    page.get_by_text("Actions and notes").click()
    page.get_by_label("Notes").fill("<b>good</b>")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Saved.").wait_for()
    assert "<b>good</b>" in (pages.root / "first" / "notes.json").read_text()


def test_curves_have_a_common_cursor_and_are_zoomed_by_dragging(pages, address, tab):
    page = tab("light", 1280)
    page.goto(f"{address}/run/{pages.number('grid/second')}")
    loss = page.locator("svg.chart").first.bounding_box()
    middle = loss["y"] + loss["height"] / 2

    def across(share):
        return loss["x"] + loss["width"] * (52 + share * 398) / 460  # the margins of the drawing

    page.mouse.move(across(0.5), middle)
    readouts = page.locator(".readout")
    readouts.nth(1).wait_for()
    assert readouts.count() == page.locator("svg.chart").count()
    words = readouts.first.inner_text()
    assert "step 45\n" in words
    shown = float(re.search(r"training ([\d.]+)", words)[1])
    assert shown == pytest.approx(train_record(45)["loss"], abs=1e-3)
    page.locator("svg.chart").first.focus()
    page.keyboard.press("Shift+ArrowRight")
    page.get_by_text("step 1", exact=True).first.wait_for()
    page.mouse.move(across(0.5), middle)
    page.mouse.down()
    page.mouse.move(across(0.75), middle)
    page.mouse.up()
    page.wait_for_url("**from=45&to=67.5")
    page.get_by_text("50", exact=True).first.wait_for()
    page.mouse.dblclick(across(0.5), middle)
    page.wait_for_url(lambda url: "from" not in url)

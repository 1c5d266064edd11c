"""The pages in a real browser, where Playwright and Chromium are installed: no errors, one host, a small screen."""

import shutil
import socket
import threading

import pytest
import uvicorn

from tests.board.conftest import TOKEN, Pages
from tests.helpers.board_runs import write_run

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
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_and_button_works_in_a_browser(pages, address, browser, scheme):
    page = browser.new_context(color_scheme=scheme, viewport={"width": 360, "height": 800}).new_page()
    errors, hosts = [], set()
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.goto(f"{address}/?token={TOKEN}")
    page.get_by_role("heading", name="Runs").wait_for()
    first, second = pages.number("first"), pages.number("grid/second")
    for path in ("/", f"/run/{first}/data", f"/compare?run={first}&run={second}", "/queue", "/new", f"/run/{first}"):
        page.goto(address + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
    page.get_by_text("Actions and notes").click()
    page.get_by_label("Notes").fill("<b>good</b>")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Saved.").wait_for()
    assert "<b>good</b>" in (pages.root / "first" / "notes.json").read_text()
    page.goto(address)
    write_run(pages.root / "first", 61)  # a live page shows the new step
    page.get_by_text("61 / 61").wait_for()
    page.get_by_label("compare first").check()
    page.get_by_label("compare grid/second").check()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("heading", name="2 runs compared").wait_for()
    assert errors == []
    assert hosts == {address.removeprefix("http://")}

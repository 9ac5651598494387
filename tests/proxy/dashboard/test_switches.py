"""Switches of the dashboard, and plans for other tenants, in a real browser."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.browser import browsing, needs_chromium
from tests.proxy.dashboard.test_in_browser import HAS_AXE, KEYS, RULES, Dashboard
from tests.proxy.embedded_server import running_embedded

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PRIVATE = {**KEYS[0], "name": "alone", "scope": "private", "tenant": "garage", "sha256": "0" * 64}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dashboard(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Dashboard]:
    async with (
        running_embedded(auth__keys=[*KEYS, PRIVATE]) as server,
        browsing(tmp_path_factory.mktemp("chromium")) as tab,
    ):
        messages = (("system", RULES), ("user", "Which tyre fits?"))
        assert (await server.chat(*messages, headers={"X-Api-Key": "sk-other"})).status == 200
        await tab.look()
        await tab.open(f"{server.url}/admin/ui")
        await tab.type("#key", "sk-root")
        await tab.press("Enter")
        await tab.until("document.title.startsWith('Overview')")
        yield Dashboard(server, tab)


async def test_sharing_is_stopped_and_allowed_again(dashboard: Dashboard) -> None:
    """Each after a question; the next request is served so, and the page says what holds."""
    tab = dashboard.tab
    steps = (
        ("Exact only", "exact", "equal prefixes only"),
        ("Stop sharing", "off", "Sharing is off"),
        ("Share again", "approx", "similar prompts"),
    )
    for verb, mode, words in steps:
        await dashboard.show("overview")
        await tab.click(f"{verb} …")
        await tab.until("document.querySelector('dialog')?.open")
        before = (await dashboard.ask("/admin/status"))["limits"]["max_mode"]
        assert before != mode
        if HAS_AXE:
            assert await dashboard.violations() == []
        await tab.click(verb)
        await tab.until(f"document.querySelector('main').innerText.includes('{words}')")
        assert (await dashboard.ask("/admin/status"))["limits"]["max_mode"] == mode
        answer = await dashboard.server.chat(("user", "Again?"), headers={"X-Api-Key": "sk-chat"})
        request = await dashboard.ask(f"/admin/requests/{answer.headers['X-KVShare-Request']}")
        assert request["mode"] == mode
    assert tab.complaints == []


async def test_a_question_that_is_closed_changes_nothing(dashboard: Dashboard) -> None:
    tab = dashboard.tab
    await dashboard.show("overview")
    await tab.click("Stop sharing …")
    await tab.press("Escape")
    await tab.until("document.querySelector('dialog') === null")
    assert (await dashboard.ask("/admin/status"))["limits"]["max_mode"] == "approx"


async def test_why_plans_for_another_tenant(dashboard: Dashboard) -> None:
    """From what that tenant has stored; the administrator's own tenant has nothing like it."""
    tab = dashboard.tab
    await dashboard.show("why")
    listed = await tab.run("[...document.querySelector('#whose').options].map(it => it.text)")
    assert listed[0] == "the tenant of your key"
    assert {"shop", "garage, key alone"} <= set(listed)
    body = (
        f'{{"messages": [{{"role": "system", "content": "{RULES}"}}, {{"role": "user", "content": "Now?"}}]}}'
    )
    await tab.run("form.value = 'body'; form.dispatchEvent(new Event('change'))")
    await tab.type("#text", body)
    for place, words in ((0, "would be computed"), (listed.index(KEYS[2]["tenant"]), "would be reused")):
        await tab.run(f"whose.selectedIndex = {place}; whose.dispatchEvent(new Event('change'))")
        await tab.run("document.querySelector('#result').replaceChildren()")
        await tab.click("Explain")
        await tab.until(f"document.querySelector('#result').innerText.includes('{words}')")
    assert tab.complaints == []

"""The dashboard in a real browser, in front of the real engine with the bundled demo model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from delta_tree import NodeId
from tests.browser import Tab, browsing, needs_chromium
from tests.delta_tree.fake_prompts import fresh_draft
from tests.proxy.conftest import running_server
from tests.proxy.embedded_server import EmbeddedServer, running_embedded

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HOSTILE = "<img src=x onerror=document.title='run'>"
NAMES = {"chat": ("shop", "infer"), "root": ("shop", "admin"), "other": (HOSTILE, "infer")}
KEYS = [
    {
        "name": name,
        "tenant": tenant,
        "role": role,
        "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(),
    }
    for name, (tenant, role) in NAMES.items()
]
VIEWS = ("overview", "live", "why", "tree", "memory", "fidelity", "replicas")
RULES = "Be polite and short. Returns are free within thirty days if the goods are unused. " * 4
HAS_AXE = find_spec("axe_core_python") is not None


@dataclass(frozen=True)
class Dashboard:
    """A server with some traffic, and a browser that is signed in."""

    server: EmbeddedServer
    tab: Tab

    async def show(self, view: str) -> None:
        """Open a view by its address, and wait until it is drawn."""
        # What an earlier view has asked for is not drawn any more once the new one is asked for.
        asked = f"location.hash = '#{view}'; window.dispatchEvent(new Event('hashchange'))"
        await self.tab.run(f"{asked}; document.querySelector('#main').replaceChildren()")
        await self.tab.until("Boolean(document.querySelector('main h1'))")

    async def ask(self, path: str) -> dict[str, Any]:
        async with self.server.http.get(self.server.url + path, headers={"X-Api-Key": "sk-root"}) as response:
            document: dict[str, Any] = await response.json()
        return document

    async def violations(self) -> list[str]:
        """What axe-core finds wrong on the page."""
        await self.tab.run(files("axe_core_python").joinpath("axe.min.js").read_text("utf-8"))
        rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
        found = await self.tab.run(f"axe.run(document, {json.dumps(rules)}).then(it => it.violations)")
        return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dashboard(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Dashboard]:
    async with (
        running_embedded(auth__keys=KEYS) as server,
        browsing(tmp_path_factory.mktemp("chromium")) as tab,
    ):
        for name in ("chat", "chat", "other"):
            for question in ("Which tyre fits?", "May I return a helmet?"):
                messages = (("system", RULES), ("user", question))
                headers = {"X-Api-Key": f"sk-{name}"}
                assert (await server.chat(*messages, headers=headers)).status == 200
        await tab.look()
        await tab.open(f"{server.url}/admin/ui")
        await tab.type("#key", "sk-root")
        await tab.press("Enter")
        await tab.until("document.title.startsWith('Overview')")
        yield Dashboard(server, tab)


@pytest.mark.parametrize("view", [*VIEWS, "why/REQUEST", "tree/of/NAMESPACE", "tree/NODE"])
async def test_each_view_fits_and_complains_of_nothing(dashboard: Dashboard, view: str) -> None:
    """In light, dark and on a phone: nothing is wider than the window, and the console is empty."""
    tab = dashboard.tab
    await dashboard.show(await address(dashboard, view))
    for width, dark in ((1280, False), (1280, True), (400, False)):
        await tab.look(width=width, dark=dark)
        assert await tab.run("document.documentElement.scrollWidth") <= width
        if HAS_AXE and width > 400:
            assert await dashboard.violations() == []
    await tab.look()
    assert "No figures" not in await tab.text()
    assert tab.complaints == []


async def address(dashboard: Dashboard, view: str) -> str:
    """With the ids of something that is stored."""
    requests = (await dashboard.ask("/admin/requests"))["requests"]
    root = (await dashboard.ask("/admin/tree"))["roots"][0]
    names = {"REQUEST": requests[0]["id"], "NAMESPACE": root["namespace"], "NODE": str(root["id"])}
    for name, value in names.items():
        view = view.replace(name, value)
    return view


async def test_figures_are_those_of_the_api(dashboard: Dashboard) -> None:
    """The overview adds up what `/admin/activity` says."""
    await dashboard.show("overview")
    text = await dashboard.tab.text()
    total = (await dashboard.ask("/admin/activity"))["total"]
    assert total["exact"] > 0
    for kind in ("exact", "copied", "repaired", "recomputed"):
        assert f"{total[kind]:,}" in text
    tokens = sum(total[kind] for kind in ("exact", "copied", "repaired", "recomputed"))
    assert f"{100 * (total['exact'] + total['copied']) / tokens:.0f} %" in text
    drawn = await dashboard.tab.run("document.querySelectorAll('.chart rect.exact').length")
    assert drawn >= 1


async def test_why_colours_the_prompt_by_the_plan(dashboard: Dashboard) -> None:
    """Each span's text is the caller's own; what is marked adds up to the prompt."""
    tab, prompt = dashboard.tab, f"Today is Monday. {RULES}Which tyre fits?"
    await dashboard.show("why")
    await tab.run("document.querySelector('#mode').focus()")
    await tab.type("#text", prompt)
    await tab.click("Explain")
    await tab.until("document.querySelector('.text mark')")
    marks = await tab.run(
        "[...document.querySelectorAll('.text mark')].map(it => [it.className, it.textContent])"
    )
    assert prompt in "".join(text for _, text in marks)
    assert {"copied", "computed"} <= {kind for kind, _ in marks}
    copied = "".join(text for kind, text in marks if kind == "copied")
    assert "Returns are free" in copied
    assert "Monday" not in copied
    assert "would be reused" in await tab.text()
    if HAS_AXE:
        assert await dashboard.violations() == []


async def test_what_is_no_body_is_said_next_to_it(dashboard: Dashboard) -> None:
    tab = dashboard.tab
    await dashboard.show("why")
    await tab.run("form.value = 'body'; form.dispatchEvent(new Event('change')); text.value = ''")
    await tab.type("#text", "[1]")
    await tab.click("Explain")
    await tab.until("document.querySelector('[role=alert]')?.innerText.includes('Expected a JSON object')")


async def test_a_tenant_is_text_and_never_html(dashboard: Dashboard) -> None:
    """Its name is shown as it was configured."""
    for view in ("overview", "live", "tree"):
        await dashboard.show(view)
        await dashboard.tab.until(f"document.body.innerText.includes({json.dumps(HOSTILE)})")
        assert await dashboard.tab.run("document.querySelectorAll('main img').length") == 0
    assert await dashboard.tab.run("document.title") != "run"


async def test_the_keyboard_reaches_everything(dashboard: Dashboard) -> None:
    """Tab leads on; a view that was chosen has the focus at its heading, and Escape closes a question."""
    tab = dashboard.tab
    await dashboard.show("overview")
    await tab.run("document.activeElement.blur(); window.getSelection().removeAllRanges()")
    reached: list[str] = []
    for _ in range(16):
        await tab.press("Tab")
        reached.append(await tab.run("document.activeElement.innerText.trim()"))
        if reached[-1] == "Memory":
            break
    assert reached[-1] == "Memory", reached
    await tab.press("Enter")
    await tab.until(
        "document.activeElement.tagName === 'H1' && document.activeElement.innerText === 'Memory'"
    )
    await tab.click("Evict everything …")
    await tab.until("document.querySelector('dialog')?.open")
    assert await tab.run("document.activeElement.innerText") == "Cancel"
    await tab.press("Escape")
    await tab.until("document.querySelector('dialog') === null")


async def test_an_eviction_is_shown_before_it_is_done(dashboard: Dashboard) -> None:
    """The question has what a dry run says; only the second click evicts."""
    tree, tab = dashboard.server.engine.sharing.tree, dashboard.tab
    node = tree.insert(fresh_draft(list(range(40)), namespace="to-go")).node.node_id
    await dashboard.show(f"tree/{node}")
    await tab.click("Evict …")
    await tab.until(
        "document.querySelector('dialog')?.innerText"
        ".includes('1 prompt and 1 segment of KV would go, which frees 400 B')"
    )
    assert tree.get(node) is not None
    await tab.click("Evict")
    await tab.until("location.hash === '#tree'")  # nothing of its tenant is left
    assert tree.get(node) is None


async def test_a_request_whose_prompts_are_gone(dashboard: Dashboard) -> None:
    """It says so, and asks for nothing that is not stored: the console stays empty."""
    messages = (("system", "A rule that nobody else has. " * 6), ("user", "What now?"))
    answer = await dashboard.server.chat(*messages, headers={"X-Api-Key": "sk-chat"})
    unique_id = answer.headers["X-KVShare-Request"]
    known = await dashboard.ask(f"/admin/requests/{unique_id}")
    node = known["stored"][0]["node"]
    assert known["gone"] == []
    dashboard.server.engine.sharing.tree.evict(NodeId(node))
    assert (await dashboard.ask(f"/admin/requests/{unique_id}"))["gone"] == [node]
    await dashboard.show(f"why/{unique_id}")
    assert f"prompt {node}, evicted since" in await dashboard.tab.text()
    assert dashboard.tab.complaints == []


async def test_pinning_and_its_end(dashboard: Dashboard) -> None:
    """Each after a question that says how much it concerns."""
    tree, tab = dashboard.server.engine.sharing.tree, dashboard.tab
    node = NodeId((await dashboard.ask("/admin/tree"))["roots"][0]["id"])
    await dashboard.show(f"tree/{node}")
    for verb, pinned in (("Pin", True), ("Unpin", False)):
        await tab.click(f"{verb} …")
        await tab.click(verb)
        other = "Unpin …" if pinned else "Pin …"
        await tab.until(f"[...document.querySelectorAll('button')].some(it => it.innerText === '{other}')")
        assert tree.node(node).pinned is pinned


async def test_many_prompts_come_in_pages(dashboard: Dashboard) -> None:
    """Fifty at a time, on demand; so do those below one."""
    tree, tab = dashboard.server.engine.sharing.tree, dashboard.tab
    parent = tree.insert(fresh_draft(range(5_000, 5_040), namespace="many")).node.node_id
    for number in range(60):
        tree.insert(fresh_draft([number, *range(30)], namespace="many"))
        tree.insert(fresh_draft([number, *range(60)], namespace="many", parent=parent))
    rows = "document.querySelectorAll('tbody tr').length"
    await dashboard.show("tree/of/many")
    await tab.until(f"{rows} === 50")
    await tab.click("Show 11 of 11 more")
    await tab.until(f"{rows} === 61")
    await tab.click("Longest")
    await tab.until(f"{rows} === 50")
    await tab.until("document.querySelectorAll('button.twist').length === 1")
    await tab.run("document.querySelector('button.twist').focus()")
    await tab.press("Enter")
    await tab.until(f"{rows} === 101")  # the first fifty below it, and a row that gets the others
    await tab.click(f"10 more below {parent}")
    await tab.until(f"{rows} === 110")
    tree.purge_nodes(node.node_id for node in tree.nodes("many"))


async def test_the_key_is_kept_for_this_tab_only(dashboard: Dashboard) -> None:
    """A wrong one is refused with the server's words; to forget it leads back to the question."""
    tab = dashboard.tab
    await dashboard.show("memory")
    kept = "[sessionStorage.length, localStorage.length, document.cookie]"
    assert await tab.run(kept) == [1, 0, ""]
    await tab.click("Forget the key")
    await tab.until("document.querySelector('#key')")
    assert await tab.run(kept) == [0, 0, ""]
    assert "GB" not in await tab.text()
    for wrong, words in (
        ("sk-wrong", "Incorrect or missing API key"),
        ("sk-chat", "may not use admin routes"),
    ):
        await tab.run("document.querySelector('#key').value = ''")
        await tab.type("#key", wrong)
        await tab.click("Open")
        await tab.until(f"document.querySelector('[role=alert]')?.innerText.includes('{words}')")
    await tab.until_complaints(6)  # the browser reports each refusal: two keys, three questions each
    tab.complaints.clear()
    await tab.type("#key", "sk-root")
    await tab.click("Open")
    await tab.until("document.querySelector('h1')?.innerText === 'Memory'")


async def test_without_keys_it_opens_on_the_servers_machine(dashboard: Dashboard) -> None:
    """By a loopback address; figures are there and no key is asked for. An empty server says what to do."""
    async with running_server() as server:
        await dashboard.tab.open(f"{server.url}/admin/ui/")
        await dashboard.tab.until("document.querySelector('.figures')")
        assert "No requests yet" in await dashboard.tab.text()
        assert dashboard.tab.complaints == []
    await dashboard.tab.open(f"{dashboard.server.url}/admin/ui/")
    await dashboard.tab.until("document.querySelector('.figures')")


async def test_what_modules_compute(dashboard: Dashboard) -> None:
    """Numbers as people read them, sums, and which gate stopped a plan."""
    table = yaml.safe_load(Path(__file__).with_name("computed.yaml").read_text(encoding="utf-8"))
    for module, rows in table.items():
        for expression, expected in rows:
            found = await dashboard.tab.run(f"import('/admin/ui/{module}').then(it => it.{expression})")
            assert found == expected, (module, expression)

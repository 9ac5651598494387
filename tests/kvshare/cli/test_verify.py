"""`kvshare verify`: what it says of models that are proved, proved in part, and refused."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, T5Config, T5ForConditionalGeneration

from kvshare.cli.views import draw
from kvshare.demo import MODEL_PATH
from kvshare_lab.bench.random_models import tiny_model
from tests.kvshare.cli.conftest import Cli


@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
def test_a_plain_model_shares_everything(cli: Cli) -> None:
    document = cli("verify", "demo", "--format", "json").document
    assert (document["shares"], document["why"]) == ("everything", None)
    assert len(document["layers"]) == 6
    for layer in document["layers"]:
        keys, values = layer["rows"]
        assert (keys["moves"], values["moves"]) == ("half 0:48", "stays")
        assert keys["error"] < 1e-4
        assert keys["control"] > 4


def test_each_kind_of_layer_has_its_rows(cli: Cli, tmp_path: Path) -> None:
    tiny_model("cohere2").save_pretrained(tmp_path)
    lines = cli("verify", tmp_path).stdout.splitlines()
    assert "shares everything" in " ".join(lines[:2])
    assert any(line.startswith("0-2") and "interleaved 0:16" in line and "last 32" in line for line in lines)
    assert any(line.startswith("3 ") and "stays" in line and "all earlier" in line for line in lines)


def test_what_cannot_be_moved_is_said_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    outcome = cli("verify", tmp_path)
    assert outcome.code == 0
    assert "shares same positions" in outcome.stdout
    assert "keys of layer 0" in outcome.stdout


def test_of_a_model_with_another_attention_nothing_is_shared(cli: Cli, tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    outcome = cli("verify", tmp_path)
    assert outcome.code == 0
    assert "shares nothing" in outcome.stdout
    assert "does not work with the cache and attention of KVShare" in " ".join(outcome.stdout.split())


def test_an_encoder_fails_by_name(cli: Cli, tmp_path: Path) -> None:
    T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    ).save_pretrained(tmp_path)
    outcome = cli("verify", tmp_path)
    assert outcome.code == 1
    assert "T5" in outcome.stderr


def test_a_wrong_dtype_is_wrong_usage(cli: Cli) -> None:
    outcome = cli("verify", "demo", "--dtype", "int8")
    assert outcome.code == 2
    assert "--dtype" in outcome.stderr


def test_the_least_control_is_shown_also_where_it_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys that are all zero fit anything, and are the ones to be shown."""
    kind = {"name": "k", "heads": 1, "dim": 8, "moves": None, "why": "no", "error": 0.0}
    layers = [
        {"layer": number, "sees": "all", "rows": [{**kind, "control": control}]}
        for number, control in enumerate((0.0, 3.0))
    ]
    document = {
        "model": "m",
        "dtype": "float32",
        "max_model_len": 8,
        "bytes_per_token": 8,
        "shares": "same positions",
        "repairs": "by place",
        "attention_error": 0.0,
        "why": "no",
        "layers": layers,
    }
    draw("verify", document)
    assert " 0x" in capsys.readouterr().out

"""What of a result file goes into the repository, and what code it says that it is of."""

import json
from pathlib import Path

from benchmarks.publish import publish
from lade.bench.environment import code


def test_totals_stand_for_the_answers_of_a_result(tmp_path: Path) -> None:
    entries = [{"num_steps": 3, "sec": 0.25, "overhead": 0.1, "same_text": True}]
    entries += [{**entries[0], "num_steps": 4, "overhead": 0.3}]
    prompts = [{"id": str(i), "loops": False, "lade": entry} for i, entry in enumerate(entries)]
    prompts += [{"id": "2", "loops": True, "lade": entries[0]}]
    given = {"assistant": "self:int8", "methods": {"lade": "lade, with one pool"}}
    speeds = {"num_prompts": 3, "tokens_per_sec": 1 / 3, "speedup": 1.5}
    summary = {
        group: {"lade": {**speeds, "steps": 10, "acceptance_rate": None}}
        for group in ("writing", "overall")
    }
    result = {
        "environment": {"gpu": None},
        "settings": given,
        "summary": summary,
        "prompts": prompts,
    }
    source, out = tmp_path / "result.json", tmp_path / "published.json"
    source.write_text(json.dumps(result))
    publish(source, out)
    assert json.loads(out.read_text()) == {
        "environment": {"gpu": None},
        "settings": {"assistant": "self:int8", "methods": ["lade"]},
        "summary": {
            "writing": {"lade": {"num_prompts": 3, "speedup": 1.5}},
            "overall": {
                "lade": {**speeds, "tokens_per_sec": 0.333333, "steps": 10, "overhead": 0.1}
            },
        },
        "prompts": [
            {
                "loops": False,
                "num_prompts": 2,
                "lade": {"num_steps": 7, "sec": 0.5},
            }
        ],
    }
    config = {"max_draft_tokens": 8, "stable_text": False}
    source.write_text(json.dumps({**result, "settings": {"config": config}}))
    publish(source, out)
    published = json.loads(out.read_text())
    assert "prompts" not in published
    assert published["settings"] == {"config": {"max_draft_tokens": 8}}


def test_the_digest_is_of_the_source_alone(tmp_path: Path) -> None:
    (tmp_path / "lade" / "hf").mkdir(parents=True)
    path = tmp_path / "lade" / "hf" / "api.py"
    path.write_text("one")
    before = code(tmp_path)
    (tmp_path / "lade" / "notes.txt").write_text("no code")
    assert code(tmp_path) == before
    path.write_text("two")
    assert code(tmp_path) != before
    path.rename(path.with_name("call.py"))
    assert code(tmp_path) != before
    assert len(code()) == 12


def test_of_stages_what_is_empty_is_left_out(tmp_path: Path) -> None:
    rows = [{"method": "plain", "sec": 0.5, "num_recorded": 0, "peak_bytes": None}]
    result = {
        "environment": {"gpu": None},
        "settings": {"device": "cpu"},
        "stages": [{"stage": "plain", "rows": rows, "left_out": {}, "warnings": []}],
    }
    source, out = tmp_path / "result.json", tmp_path / "published.json"
    source.write_text(json.dumps(result))
    publish(source, out)
    kept = {"method": "plain", "sec": 0.5, "num_recorded": 0}
    assert json.loads(out.read_text()) == {
        "environment": {"gpu": None},
        "settings": {"device": "cpu"},
        "stages": [{"stage": "plain", "rows": [kept]}],
    }


def test_of_servers_last_turns_are_left_out(tmp_path: Path) -> None:
    speeds = {"num_tokens": 904, "tokens_per_sec": 22.5}
    result = {
        "environment": {"gpu": None},
        "settings": {"num_clients": [1]},
        "summary": {"1": {"lade": {**speeds, "last_turn_first_token_sec": 0.2}}},
    }
    source, out = tmp_path / "result.json", tmp_path / "published.json"
    source.write_text(json.dumps(result))
    publish(source, out)
    assert json.loads(out.read_text())["summary"] == {"1": {"lade": speeds}}

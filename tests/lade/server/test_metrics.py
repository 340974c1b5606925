"""What operators see, by the names they know."""

import httpx
import pytest

from lade.models.loading import LoadedModel
from tests.lade.server.serving import (
    asked,
    client_of,
    loaded_model,
    metric,
    prompt_ids,
    serving,
    text_of,
    wait_until,
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return loaded_model()


def test_counters_are_those_of_the_answers(loaded: LoadedModel) -> None:
    with serving(loaded) as server, client_of(server) as client:
        assert metric(server, "vllm:spec_decode_num_drafts_total", model_name="tiny") == 0
        details = [asked(client, user="a").usage.completion_tokens_details for _ in range(2)]
        accepted = sum(each.accepted_draft_tokens for each in details)
        rejected = sum(each.rejected_draft_tokens for each in details)
        assert metric(server, "vllm:spec_decode_num_accepted_tokens_total") == accepted
        assert metric(server, "vllm:spec_decode_num_draft_tokens_total") == accepted + rejected
        by_position = [
            metric(
                server, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place)
            )
            for place in range(5)
        ]
        assert sum(by_position) == accepted
        assert by_position == sorted(by_position, reverse=True)
        assert by_position[4] == 0  # drafts have 4 tokens
        num_drafts = metric(server, "vllm:spec_decode_num_drafts_total")
        assert by_position[0] <= num_drafts <= accepted + rejected
        text_of(asked(client, stream=True))
        wait_until(lambda: metric(server, "vllm:generation_tokens_total") == 120)
        num_prompt = prompt_ids(loaded)["input_ids"].shape[1]
        assert metric(server, "vllm:prompt_tokens_total") == 3 * num_prompt
        assert metric(server, "vllm:prefix_cache_queries_total") == 2 * num_prompt
        hits = metric(server, "vllm:prefix_cache_hits_total")
        assert num_prompt - 1 <= hits <= num_prompt
        for name in (
            "vllm:time_to_first_token_seconds",
            "vllm:request_time_per_output_token_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:e2e_request_latency_seconds",
        ):
            assert metric(server, f"{name}_count", model_name="tiny") == 3
        assert metric(server, "lade:requests_total", code="200") >= 3
        assert metric(server, "lade:pool_in_memory") == 1
        assert metric(server, "lade:pool_memory_bytes") > 0
        assert metric(server, "lade:prefix_texts") == 1
        assert metric(server, "lade:prefix_bytes") > 0
        assert metric(server, "process_resident_memory_bytes") > 0


def test_metrics_and_health_need_no_key_and_tell_no_text(loaded: LoadedModel) -> None:
    with serving(loaded, api_keys=["secret-key"]) as server:
        with client_of(server, "secret-key") as client:
            asked(client, user="alice")
        base = server.url.removesuffix("/v1")
        text = httpx.get(f"{base}/metrics").text
        assert httpx.get(f"{base}/health").status_code == 200
    for word in ("alice", "secret", "What-is"):
        assert word not in text

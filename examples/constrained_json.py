"""Force an answer into a JSON schema (pip install xgrammar); forced tokens are drafted for free."""

from typing import Any

import xgrammar
from xgrammar.contrib.hf import LogitsProcessor

import lade
from lade.models import encode, load

CONTINENTS = {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]}
FIELDS = {"capital_city": {"type": "string", "maxLength": 12}, "continent": CONTINENTS}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}


class Foreseeing(LogitsProcessor, lade.ForcedTokens):  # type: ignore[misc]
    """xgrammar's processor, which also tells lade the text that must come next."""

    def forced_tokens(self, row: int, committed: Any, max_tokens: int) -> Any:
        """Ask a copy of the matcher, which has not seen the last token yet."""
        matcher = self.matchers[row].fork() if self.matchers else None
        if matcher is None or matcher.is_terminated() or not matcher.accept_token(committed[-1]):
            return []
        ids = self.tokenizer.encode(matcher.find_jump_forward_string(), add_special_tokens=False)
        return ids[:max_tokens]


def main() -> None:
    model, tokenizer, _ = load()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False)
    processor, Foreseeing.tokenizer = Foreseeing(grammar), tokenizer  # a new one for each call
    inputs = encode(tokenizer, "Describe France as JSON, with its capital.", model.device)
    output = lade.generate(model, **inputs, logits_processor=[processor], max_new_tokens=64)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()

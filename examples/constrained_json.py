"""Force an answer into a JSON schema (pip install xgrammar); forced tokens are drafted for free."""

import xgrammar
from xgrammar.contrib.hf import LogitsProcessor

import lade
from lade.models import encode, load

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "population": {"type": "integer"},
        "capital_city": {"type": "string", "maxLength": 12},
        "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
    },
    "required": ["name", "population", "capital_city", "continent"],
    "additionalProperties": False,
}


def main() -> None:
    model, tokenizer, _ = load()
    size = model.config.vocab_size
    tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    grammar = xgrammar.GrammarCompiler(tokens).compile_json_schema(SCHEMA, any_whitespace=False)
    inputs = encode(tokenizer, "Describe France as JSON, with its name and capital.", model.device)
    output = lade.generate(
        model,
        **inputs,
        logits_processor=[LogitsProcessor(grammar)],  # a new one for each call
        do_sample=False,
        max_new_tokens=64,
    )
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()

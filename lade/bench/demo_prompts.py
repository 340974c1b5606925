"""Six prompts written for the demo, from free text to text that quotes its input."""

from lade.bench.prompts import Prompt

_TEXTS = [
    ("chat", "What should I look at first when I visit a city I have never been to before?"),
    (
        "write code",
        "Write a Python class Stack with the methods push, pop, peek, is_empty and size, each with "
        "a docstring. Then show a short example that uses every method.",
    ),
    (
        "edit code",
        """Rename the variable `d` to `price_list` and the variable `q` to `quantity` everywhere \
in this code. Change nothing else, and return the whole code.

```python
def total(d, items):
    result = 0
    for name, q in items:
        if name not in d:
            raise KeyError(f"no price for {name}")
        result += d[name] * q
    return result


def cheapest(d):
    best = None
    for name in d:
        if best is None or d[name] < d[best]:
            best = name
    return best
```""",
    ),
    (
        "summarise",
        """Summarise the following text in three sentences.

The old lighthouse at Karrow Point was built in 1871, after two cargo ships had been lost on \
the reef in a single winter. For almost a hundred years a keeper lived there with his family. \
Every evening he climbed the 164 steps to light the lamp, and every morning he climbed them \
again to put it out and to clean the lenses. Supplies came by boat once a month if the sea was \
calm, and the keeper's children learned to read from the books that the supply boat brought. In \
1968 the lamp was replaced by an electric one that needs no keeper, and the last family moved \
to the village. The house beside the tower stood empty for thirty years. Then a group of \
volunteers from the village began to repair it, and today it is a small museum. Visitors can \
climb the 164 steps, see the old lenses, and read the keeper's logbook, in which he noted the \
weather, the passing ships, and, on one page, the birth of his daughter during a storm.""",
    ),
    (
        "extract",
        """Extract every order from the message below as a list with one line for each order, in \
the form: name | product | number | city.

Hello, this is the list for Monday. Marta Lindqvist from Uppsala wants 12 oak shelves. The school \
in Turku, that is Jari Koskinen, ordered 40 desk lamps. We also have Priya Raman in Bergen, who \
needs 3 standing desks, and Tom Okafor in Aarhus with 25 folding chairs. And please do not forget \
Elena Petrova from Tallinn: 8 book carts.""",
    ),
    (
        "maths",
        "A baker sells bread for 4 euros a loaf and rolls for 50 cents each. On Saturday she sold "
        "36 loaves and three times as many rolls as loaves. She spent 75 euros on flour and 18 "
        "euros on electricity. How much money was left? Explain each step.",
    ),
]

DEMO_PROMPTS = [Prompt(title, title, text) for title, text in _TEXTS]

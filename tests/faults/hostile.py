"""Values, texts and bytes that break readers, or would run code in them."""

import math
import random
import struct
from typing import Any

WITNESS = "witness"
"""A file that hostile content would create in the current folder if it ran."""
EXTREMES = (0, 1, -1, 2**15, 2**31 - 1, -(2**31), 2**32 - 1, 2**48, 2**63 - 1, -(2**63))
MARKUP = (
    "</script><script>document.title = 1</script><img src=x onerror=alert(1)><!--",
    "<b onclick=alert(1)>[a](javascript:alert(1)) ![a](http://a/b) `a` **a** | a |\n\n# a\n",
)
VALUES: tuple[Any, ...] = (
    None, True, False, *EXTREMES, 2**64, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf, "", "\0", "\ud800",
    "a" * 100_000, "\x1b]0;title\x07", "../../etc/passwd", "/etc/passwd", "1e9", "{{ 1 }}", "9" * 500, [], [[]], {},
    {"": None}, {"a": {"b": []}}, [None] * 1000, [0, -1, "a"], list(range(70_000)), "__DEEP__",
)  # fmt: skip
TAGS = (
    f"!!python/object/apply:os.system ['touch {WITNESS}']", f"!!python/object/new:os.system ['touch {WITNESS}']",
    "!!python/name:os.system", "!!binary 'x'", "!!timestamp 99999-99-99", "!!set {a, b}", "!!omap [a: 1]", "1:2:3",
    "&a [*a]", "!!float ._", "!!int _", "2020-02-31", "*b", "{a: 1, a: 2}", "!<tag:yaml.org,2002:int> x", "? [a]\n: b",
)  # fmt: skip
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ self.__init__.__globals__ }}", "{% include '/etc/passwd' %}",
    f"{{{{ cycler.__init__.__globals__.os.system('touch {WITNESS}') }}}}", "{{ raise_exception(messages) }}",
    f"{{{{ lipsum.__globals__['os'].popen('touch {WITNESS}') }}}}", "{{ messages.append(1) }}",
    "{{ messages[10**30] }}", "{{ 1/0 }}", "{{ tools|tojson(indent=10**9) }}", "{{ ('%' ~ 10**6 ~ 'd') % 1 }}",
    "{{ range(10**9)|list }}",
)  # fmt: skip
SLOW_TEMPLATES = (
    "{{ 'a' * 10**9 }}", "{% for i in range(9**9) %}{% endfor %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 9**9**9 }}", "{{ 'a'|center(10**10) }}", "{{ ('%' ~ 10**9 ~ 'd') % 1 }}",
)  # fmt: skip


class Runs:
    """A pickle of this creates the witness when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({WITNESS!r}, 'w')",)


def damage(content: bytes, chance: random.Random) -> bytes:
    """Change bits, numbers or the length; one to four times."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        start, n = (chance.randrange(len(changed) + 1) for _ in range(2))
        way = chance.randrange(8)
        if way == 0 and changed:
            changed[start - 1] ^= 1 << chance.randrange(8)
        elif way == 1:
            del changed[start:]
        elif way == 2:
            del changed[start : start + 1 + n % 50]
        elif way == 3:
            changed[start:start] = changed[n : n + chance.randint(1, 200)]
        elif way == 4:
            changed[start:start] = chance.randbytes(chance.randint(1, 20))
        elif way == 5:
            number = chance.choice(EXTREMES).to_bytes(9, chance.choice(["little", "big"]), signed=True)
            size = chance.choice([1, 2, 4, 8])
            changed[start : start + size] = number[:size]
        elif way == 6:
            changed[start : start + 1] = changed[n : n + 1] * chance.randint(1, 2000)
        else:
            places = [i for word in (b"PK\1\2", b"PK\5\6", b"PK\3\4") if (i := changed.rfind(word)) >= 0]
            place = chance.choice(places or [start]) + chance.randrange(4, 46)
            changed[place : place + 4] = struct.pack("<I", chance.choice(EXTREMES) % 2**32)
    return bytes(changed)

"""For mkdocstrings: this project's docstrings as Markdown.

Doctests become blocks of code, lines such as `name: what it is` a list of options, and what the comments beside a
scheme's fields say of them is added to its docstring.
"""

import re

import griffe

OPTION = re.compile(r"(`?)(\w+(?:, \w+)*)`?: (.*)")


class OwnForm(griffe.Extension):
    """Rewrites every docstring when the whole package has been read."""

    def on_package(self, *, pkg, **_):
        for obj in _all(pkg):
            if obj.docstring:
                obj.docstring.value = markdown(obj.docstring.value)
                if obj.is_class and (options := list(_fields(obj))):
                    obj.docstring.value += "\n\n**Options**\n\n" + "\n".join(options)


def _all(parent):
    for member in parent.members.values():
        if not member.is_alias:
            yield member
            yield from _all(member)


def markdown(text):
    """A docstring of this project as Markdown. Its first paragraph is a sentence, whatever it looks like."""
    first, *others = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join([first, *map(_block, others)])


def _block(block):
    """Options stand one below the other; what continues one is indented, or its name is in backticks."""
    lines = block.splitlines()
    if lines[0].startswith(">>> "):
        return f"```pycon\n{block}\n```"
    begins = [OPTION.match(line) for line in lines]
    if begins[0] and (lines[0].startswith("`") or all(map(_belongs, lines, begins))):
        return "\n".join(
            _item(begin) if begin and begin[1] == begins[0][1] else f"    {line.strip()}"
            for line, begin in zip(lines, begins, strict=True)
        )
    return block


def _belongs(line, begin):
    return begin is not None or line.startswith("    ")


def _item(begin):
    names = ", ".join(f"`{name}`" for name in begin[2].split(", "))
    return f"- {names}: {begin[3]}"


def _fields(cls):
    """The fields of a dataclass, each with the comment beside it."""
    if not any("dataclass" in str(decorator.value) for decorator in cls.decorators):
        return
    for name, member in cls.members.items():
        if member.is_alias or not member.is_attribute or name.startswith("_") or "property" in member.labels:
            continue
        field, _, comment = "".join(member.lines).partition("  # ")
        if member.annotation is None or "ClassVar" in field:
            continue
        if not comment.strip():  # the signature has its name and default already
            continue
        shown = name if member.value is None else f"{name}={member.value}"
        yield f"- `{shown}`: {comment.strip()}"

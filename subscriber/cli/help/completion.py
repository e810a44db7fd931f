"""Completion for bash, zsh and fish: verbs, their actions, options, and the values of options where the list is fixed.

All three scripts ask one table, which is generated from the parser: the words of a verb, and what may follow them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Final

from subscriber.cli.help.arguments import Argument, arguments, summaries, verbs_of
from subscriber.config import PARAMETERS, SETTINGS, Option

__all__ = ["SHELLS", "completion"]

SHELLS: Final = ("bash", "zsh", "fish")
_FILES: Final = frozenset({"FILE", "DIR", "WHEEL", "LAKE"})
_ASSIGNED: Final[Mapping[str, Mapping[str, Option]]] = {"-o": PARAMETERS, "-c": SETTINGS}


def completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for a shell."""
    verbs = verbs_of(parser)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](verbs)


Verbs = Mapping[tuple[str, ...], argparse.ArgumentParser]


def _values(argument: Argument) -> tuple[str, ...]:
    """What can be completed after an option. A trailing = continues."""
    for option, known in _ASSIGNED.items():
        if option in argument.options and argument.value.endswith("=value"):
            return tuple(f"{name}." if each.keyed else f"{name}=" for name, each in known.items())
    return argument.choices


def _cases(verbs: Verbs) -> Iterator[tuple[str, list[str], list[tuple[Argument, tuple[str, ...]]]]]:
    """For each verb: its words, what may follow, and its options with a value, with the list of values."""
    for words, parser in verbs.items():
        found = list(arguments(parser))
        following = [*summaries(parser), *(option for each in found for option in each.options)]
        yield " ".join(words), following, [(each, _values(each)) for each in found if each.options and each.value]


def _bash(verbs: Verbs) -> str:
    words, values = [], []
    for verb, following, valued in _cases(verbs):
        words.append(f'        "{verb}") words="{" ".join(following)}" ;;')
        for argument, known in valued:
            pattern = "|".join(f'"{verb} {option}"' for option in argument.options)
            action = f'values="{" ".join(known)}"' if known else "files=1" if argument.value in _FILES else "return"
            values.append(f"        {pattern}) {action} ;;")
    verb_list = "|".join(sorted({" ".join(each) for each in verbs if each}))
    return _BASH.format(verbs=verb_list.replace(" ", "\\ "), words="\n".join(words), values="\n".join(values))


def _zsh(verbs: Verbs) -> str:
    lines = []
    for words, parser in verbs.items():
        following = [f"{_quoted(name)}:{_quoted(text)}" for name, text in summaries(parser).items()]
        specs = [spec for each in arguments(parser) for spec in _zsh_specs(each)]
        if following:
            specs = [*specs, "1: :->verb", "*:: :->rest"]
        elif not any(spec[1:2] == "*" or spec.startswith("*:") for spec in specs):
            specs.append("*: :_files")
        name = "_".join(("_subscriber", *(word.replace("-", "_") for word in words)))
        lines.append(f"{name}() {{\n  local curcontext=$curcontext state line\n  _arguments -C {' '.join(map(_single, specs))}")
        if following:
            cases = "\n".join(f"        {below}) {name}_{below.replace('-', '_')} ;;" for below in summaries(parser))
            described = " ".join(map(_single, following))
            lines.append(_ZSH_STATE.format(described=described, cases=cases))
        lines.append("}\n")
    return "\n".join(["#compdef subscriber", *lines, _ZSH_END])


def _zsh_specs(argument: Argument) -> Iterator[str]:
    help = _quoted(argument.help)
    for option in argument.options:
        known = _values(argument)
        values = f"({' '.join(known)})" if known else "_files" if argument.value in _FILES else " "
        yield f"*{option}[{help}]" + (f":{_quoted(argument.value)}:{values}" if argument.value else "")


def _fish(verbs: Verbs) -> str:
    known_verbs = " ".join(_fish_quoted(" ".join(words)) for words in verbs if words)
    lines = ["# completion of subscriber for fish", f"set -g __subscriber_verbs {known_verbs}", _FISH, "complete -c subscriber -f"]
    for words, parser in verbs.items():
        here = f"-n {_fish_quoted(' '.join(('__subscriber_at', *words)))}"
        for name, text in summaries(parser).items():
            lines.append(f"complete -c subscriber {here} -a {name} -d {_fish_quoted(text)}")
        for each in arguments(parser):
            names = " ".join(f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}" for option in each.options)
            if not names:
                continue
            known = _values(each)
            takes = "" if not each.value else " -r -F" if each.value in _FILES else " -x"
            if known:
                takes = f" -x -a {_fish_quoted(' '.join(known))}"
            lines.append(f"complete -c subscriber {here} {names}{takes} -d {_fish_quoted(each.help)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """For the specifications of zsh's _arguments and _describe."""
    return "".join(f"\\{each}" if each in "[]:\\" else each for each in text)


def _single(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_BASH: Final = """\
# completion of subscriber for bash
_subscriber() {{
    local word verb="" words="" values="" files="" current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    COMPREPLY=()
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "${{verb:+$verb }}$word" in
        {verbs}) verb="${{verb:+$verb }}$word" ;;
        esac
    done
    case "$verb $previous" in
{values}
    esac
    if [ -n "$files" ]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
        return
    fi
    if [ -n "$values" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
        case "${{COMPREPLY[0]}}" in *=|*.) compopt -o nospace ;; esac
        return
    fi
    case "$verb" in
{words}
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -o default -F _subscriber subscriber
"""

_ZSH_STATE: Final = """\
  case $state in
    verb) local -a verbs=({described}); _describe verb verbs ;;
    rest)
      case $line[1] in
{cases}
      esac ;;
  esac"""

_ZSH_END: Final = """\
if [ "$funcstack[1]" = "_subscriber" ]; then
  _subscriber "$@"
else
  compdef _subscriber subscriber
fi
"""

_FISH: Final = """\
function __subscriber_at
    set -l found
    for word in (commandline -opc)[2..-1]
        string match -q -- '-*' $word; and continue
        set -l tried (string join ' ' $found $word)
        contains -- $tried $__subscriber_verbs; and set found $found $word
    end
    test "$found" = "$argv"
end"""

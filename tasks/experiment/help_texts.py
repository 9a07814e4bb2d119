"""What `--help` says of a program: its docstring, and its flags by what for."""

from collections.abc import Iterable, Mapping
import textwrap

from tasks.options import Choice

_WIDTH = 80


def of_program(
  name: str,
  docstring: str,
  groups: Mapping[str, Iterable[Choice]],
  more: str = '',
) -> str:
  """Return what there is to know of a program.

  Args:
    name: The program.
    docstring: What it does.
    groups: Titles to flags; its own have none.
    more: Where to read on.
  """
  lines = [docstring.rstrip()]
  for title, choices in groups.items():
    lines += ['', f'{title or f"Flags of {name}"}:']
    for choice in sorted(choices, key=lambda choice: choice.flag):
      lines += _lines(choice)
  lines += ['', more] if more else []
  return '\n'.join(lines) + '\n'


def _lines(choice: Choice) -> list[str]:
  """What a flag is for, and its default."""
  text, value = choice.text, choice.on_command_line
  if choice.option.choices is not None:
    text = f'{text} One of {", ".join(choice.option.choices)}.'
  default = f' ({value})'
  if isinstance(value, bool):
    default = f' ({str(value).lower()})'
  # What comes from the environment or the task is said in the text.
  is_said = 'Default:' in choice.text or choice.option.differs_by_task
  if is_said or value in (None, '', ()):
    default = ''
  return textwrap.wrap(
    f'--{choice.flag}{default}: {text}',
    _WIDTH,
    initial_indent='  ',
    subsequent_indent='      ',
    break_on_hyphens=False,
  )

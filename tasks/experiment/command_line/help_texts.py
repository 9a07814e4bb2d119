"""The text of `--help`: a program's docstring, and its flags in groups."""

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
  """Return the help text of a program.

  Args:
    name: The program.
    docstring: Its module's docstring.
    groups: Titles to flags; the title of its own flags is empty.
    more: Where to read more.
  """
  lines = [docstring.rstrip()]
  for title, choices in groups.items():
    lines += ['', f'{title or f"Flags of {name}"}:']
    for choice in sorted(choices, key=lambda choice: choice.flag):
      lines += _lines(choice)
  lines += ['', more] if more else []
  return '\n'.join(lines) + '\n'


def _lines(choice: Choice) -> list[str]:
  """Return the lines of a flag: its purpose and its default."""
  text, value = choice.text, choice.on_command_line
  name = choice.flag if choice.option.python_only else f'--{choice.flag}'
  if choice.option.choices is not None:
    text = f'{text} One of {", ".join(choice.option.choices)}.'
  default = f' ({value})'
  if isinstance(value, bool):
    default = f' ({str(value).lower()})'
  # The text names defaults from the environment or the task.
  is_said = 'Default:' in choice.text or choice.option.differs_by_task
  if is_said or value in (None, '', ()):
    default = ''
  return textwrap.wrap(
    f'{name}{default}: {text}',
    _WIDTH,
    initial_indent='  ',
    subsequent_indent='      ',
    break_on_hyphens=False,
  )

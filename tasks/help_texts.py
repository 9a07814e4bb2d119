"""What `--help` says of a program: its docstring, and its flags by what for."""

from collections.abc import Iterable, Mapping, Sequence
import pathlib
import re
import textwrap
import types

from absl import flags

FLAGS = flags.FLAGS
_WIDTH = 80
_CHOICES = re.compile(r'<([^>]*)>: ')


def of_program(
  module: types.ModuleType, groups: Mapping[str, Iterable[str]]
) -> str:
  """Returns what there is to know of a program.

  Args:
    module: The program.
    groups: Titles to further flags than those that the module defines.
  """
  # As `__main__`, a module does not know its name.
  name = pathlib.Path(str(module.__file__)).stem
  own = [flag.name for flag in FLAGS.get_flags_for_module(module)]
  own += [
    flag.name
    for flag in FLAGS.get_key_flags_for_module(module)
    if flag.name not in own
  ]
  of_groups = {flag for names in groups.values() for flag in names}
  own = [flag for flag in own if flag not in of_groups]
  lines = [str(module.__doc__).rstrip()]
  for title, names in {f'Flags of {name}': own, **groups}.items():
    if names:
      lines += ['', f'{title}:', '', *_lines(sorted(names))]
  return '\n'.join(lines) + '\n'


def _lines(names: Sequence[str]) -> list[str]:
  """What flags are for, and their defaults."""
  lines = []
  for name in names:
    flag = FLAGS[name]
    text = ' '.join(str(flag.help).replace('.;', ';').split())
    # Choices come last, and can be wrapped.
    if choices := _CHOICES.match(text):
      text = f'{text[choices.end() :]} One of {choices[1].replace("|", ", ")}.'
    default = ''
    # What comes from the environment is said in the text.
    if flag.default is not None and 'Default:' not in str(flag.help):
      default = f' ({str(flag.default_as_str).strip(chr(39))})'
    lines += textwrap.wrap(
      f'--{name}{default}: {text}',
      _WIDTH,
      initial_indent='  ',
      subsequent_indent='      ',
      break_on_hyphens=False,
    )
  return lines

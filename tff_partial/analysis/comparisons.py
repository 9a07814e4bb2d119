"""Results of methods over seeds: tables of them, and a figure."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from tff_partial.analysis import figures
from tff_partial.analysis import tables
from tff_partial.analysis.errors import AnalysisError

_SHARE = 0.1  # Of the clients that are worst off.
_CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
  """Results of some methods over seeds.

  Attributes:
    metric: The metric that is compared.
    higher_is_better: True if a larger value is better.
    runs: A row for each method and seed: the `setting` that validation chose
      of `num_settings`, '' if the method has one; the pooled test metric, the
      `num_examples` that it was measured on, whether the run `diverged`, the
      `best_round` by validation, bytes that a client downloads and uploads in a
      round (NaN if not all were counted), and seconds of a round.
    clients: A row for each method, seed and measured test client, with all
      metrics of the client.
    history: A row for each method, seed and round: what the run recorded.
  """

  metric: str
  higher_is_better: bool
  runs: pd.DataFrame
  clients: pd.DataFrame
  history: pd.DataFrame

  def __repr__(self) -> str:
    """Show the table, which `to_markdown` returns for a text."""
    return self._texts('{}').to_string()

  def table(self) -> pd.DataFrame:
    """Summarize each method over seeds, in the order of the methods.

    Returns:
      By method: the `setting` that was chosen of `num_settings`; `mean` and
      `std` (of a sample) of the metric; `ci95`, half the width of its 95 %
      confidence interval by Student's t; `difference` to the first method, a
      mean over pairs of one seed, and `p`, that of the paired t test;
      `worst_decile`, the mean over the tenth of clients that are worst off;
      `hurt`, the share of clients that are worse off than with the first
      method; `diverged` runs, and those whose metric is `undefined`, which are
      in no other column but these; bytes a round, and seconds.
    """
    methods = list(dict.fromkeys(self.runs['method']))
    rows = [self._row(method, methods[0]) for method in methods]
    return pd.DataFrame(rows, index=pd.Index(methods, name='method'))

  def _row(self, method: str, first: str) -> dict[str, Any]:
    values = self._by_seed(method)
    number = len(values)
    deviation = values.std() if number > 1 else np.nan
    quantile = stats.t.ppf((1 + _CONFIDENCE) / 2, max(number - 1, 1))
    difference, p = np.nan, np.nan
    if method != first:
      pairs = (values - self._by_seed(first)).dropna()
      difference = pairs.mean()
      # Equal differences of float32 metrics differ by their rounding.
      if len(pairs) > 1 and pairs.std() > 1e-6 * values.abs().max():
        p = stats.ttest_1samp(pairs, 0.0).pvalue
    own = self.runs[self.runs['method'] == method]
    return {
      **own[['setting', 'num_settings']].iloc[0],
      'mean': values.mean(),
      'std': deviation,
      'ci95': quantile * deviation / np.sqrt(number) if number else np.nan,
      'difference': difference,
      'p': p,
      'worst_decile': self._worst(method),
      'hurt': np.nan if method == first else self._hurt(method, first),
      'diverged': int(own['diverged'].sum()),
      'undefined': int((own[self.metric].isna() & ~own['diverged']).sum()),
      'download_bytes': own['download_bytes'].mean(),
      'upload_bytes': own['upload_bytes'].mean(),
      'seconds_round': own['seconds_round'].mean(),
    }

  def _by_seed(self, method: str) -> pd.Series:
    """Return the metric of a method's runs that ended well, by seed."""
    own = self.runs[self.runs['method'] == method].set_index('seed')
    return own[self.metric].dropna()

  def _of_clients(self, method: str) -> pd.Series:
    """Return the metric of each client of a method, by seed and client."""
    own = self.clients[self.clients['method'] == method]
    return own.set_index(['seed', 'client'])[self.metric].dropna()

  def _worst(self, method: str) -> float:
    values = self._of_clients(method)

    def of_seed(found: pd.Series) -> float:
      ordered = found.sort_values(ascending=self.higher_is_better)
      return float(ordered.iloc[: max(1, round(_SHARE * len(ordered)))].mean())

    return float(values.groupby('seed').apply(of_seed).mean())

  def _hurt(self, method: str, first: str) -> float:
    gain = (self._of_clients(method) - self._of_clients(first)).dropna()
    worse = gain < 0 if self.higher_is_better else gain > 0
    return float(worse.groupby('seed').mean().mean())

  def _texts(self, bold: str) -> pd.DataFrame:
    """Return the table as text, the best mean between `bold` marks."""
    table = self.table()
    ordered = table['mean'].sort_values(ascending=not self.higher_is_better)
    best = ordered.index[0]

    def number(value: float, form: str = '.3f', beside: float = 0.0) -> str:
      if 0.0 < max(abs(value), abs(beside)) < 0.01:
        form = form.replace('.3f', '#.2g')
      return '' if np.isnan(value) else format(value, form)

    rows = []
    for method, row in table.iterrows():
      mean = number(row['mean'])
      if not np.isnan(row['std']):
        mean += f' ± {number(row["std"], beside=row["mean"])}'
      if method == best and mean:
        mean = bold.format(mean)
      lost = [
        f'{row[why]:.0f} {why}' for why in ('diverged', 'undefined') if row[why]
      ]
      if lost:
        mean = f'{mean} ({", ".join(lost)})'.lstrip()
      p = f' (p = {number(row["p"], ".2g")})' if not np.isnan(row['p']) else ''
      rows.append(
        {
          'method': method,
          self.metric: mean,
          'difference': number(row['difference'], '+.3f') + p,
          'worst tenth': number(row['worst_decile']),
          'hurt': number(row['hurt'], '.0%'),
          'kB up': number(row['upload_bytes'] / 1e3, '.1f'),
          's a round': number(row['seconds_round'], '.2f'),
        }
      )
    texts = pd.DataFrame(rows).set_index('method')
    if (table['num_settings'] > 1).any():
      tuned = table[['setting', 'num_settings']].to_numpy()
      of = [f'{setting} (of {number})'.strip() for setting, number in tuned]
      texts.insert(1, 'setting', of)
    return texts

  def to_markdown(self) -> str:
    """Format the table in Markdown, with the best mean in bold."""
    return tables.markdown(self._texts('**{}**').reset_index())

  def to_latex(self) -> str:
    """Format the table in LaTeX for `booktabs`, with the best mean in bold."""
    # The signs around a bold text are none that text has.
    texts = self._texts('\x02{}\x03').reset_index()
    rows = [list(texts.columns), *texts.to_numpy().tolist()]
    escape = {sign: f'\\{sign}' for sign in '%_&#${}'} | {
      '\\': r'\textbackslash{}',
      '^': r'\textasciicircum{}',
      '~': r'\textasciitilde{}',
      '±': r'$\pm$',
      '\x02': r'\textbf{',
      '\x03': '}',
    }
    lines = [
      ' & '.join(cell.translate(str.maketrans(escape)) for cell in row) + r' \\'
      for row in rows
    ]
    columns = 'l' + 'r' * (texts.shape[1] - 1)
    lines.insert(1, r'\midrule')
    begin = [rf'\begin{{tabular}}{{{columns}}}', r'\toprule']
    return '\n'.join([*begin, *lines, r'\bottomrule', r'\end{tabular}'])

  def draw(self, column: str = 'loss') -> figures.Figure:
    """Draw a column of the history over rounds, a line for each method.

    Args:
      column: Such as `loss`, or `validation_accuracy`.

    Returns:
      A figure of means over seeds that did not diverge, and their deviations.

    Raises:
      AnalysisError: If no run recorded it.
    """
    if column not in self.history:
      raise AnalysisError(
        f'No run recorded {column!r}. Choose one of '
        f'{[c for c in self.history if c not in ("method", "seed", "round")]}.'
      )
    values = pd.to_numeric(self.history[column], errors='coerce')
    known = self.history.assign(**{column: values}).dropna(subset=[column])
    known = known.merge(self.runs[['method', 'seed', 'diverged']])
    figure = figures.new(6.0, 3.6)
    axes = figure.subplots()
    figures.tidy(axes)
    for place, method in enumerate(dict.fromkeys(self.runs['method'])):
      is_own = known['method'] == method
      own = known[is_own & ~known['diverged']].groupby('round')[column]
      mean, deviation = own.mean(), own.std()
      lost = known[is_own & known['diverged']]['seed'].nunique()
      label = f'{method} ({lost} diverged)' if lost else method
      look = figures.style(place)
      axes.plot(mean.index, mean, label=label, linewidth=1.5, **look)
      axes.fill_between(
        mean.index,
        mean - deviation,
        mean + deviation,
        color=look['color'],
        alpha=0.15,
        linewidth=0,
      )
    axes.set_xlabel('round', color=figures.INK)
    axes.set_ylabel(figures.axis_name(column), color=figures.INK)
    figures.add_legend(axes)
    return figure

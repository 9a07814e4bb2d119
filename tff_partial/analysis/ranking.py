"""Ranking metrics of a user model: DOA and NDCG of HPFL, section 5.3.2.

A user model gives each user a hidden characteristic h for each attribute, such
as a student's capability in each skill (Eq. 8). The degree of agreement
compares users by one attribute, NDCG compares attributes of one user.
"""

from collections.abc import Sequence

import numpy as np

from tff_partial.analysis.errors import AnalysisError


def mean_answers(
  user: np.ndarray,
  attributes: np.ndarray,
  answer: np.ndarray,
  num_users: int,
  num_attributes: int,
) -> np.ndarray:
  """Average each user's answers to the items that have an attribute.

  Args:
    user: The user of each record, integers `[records]` from 0.
    attributes: The attributes of its item, integers `[records, width]` from 0,
      each once; padded with negative numbers.
    answer: Its answer, true or predicted, `[records]`.
    num_users: The number of users.
    num_attributes: The number of attributes.

  Returns:
    float64 `[users, attributes]`; NaN where a user answered no such item.

  Raises:
    AnalysisError: If a user or an attribute is beyond its number.
  """
  user, attributes, answer = map(np.asarray, (user, attributes, answer))
  known = {'user': (user, num_users), 'attribute': (attributes, num_attributes)}
  for what, (ids, number) in known.items():
    if ids.size and ids.max() >= number:
      raise AnalysisError(
        f'mean_answers: {what} {ids.max()} is none of {number}, which are '
        f'counted from 0. Give num_{what}s={ids.max() + 1} or more.'
      )
  record, column = np.nonzero(attributes >= 0)
  attribute = attributes[record, column]
  cell = user[record].astype(np.int64) * num_attributes + attribute
  size = num_users * num_attributes
  counts = np.bincount(cell, minlength=size)
  sums = np.bincount(cell, answer[record].astype(np.float64), minlength=size)
  means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
  return means.reshape([num_users, num_attributes])


# ---- users by one attribute --------------------------------------------------


def degree_of_agreement(
  hidden: np.ndarray,
  answers: np.ndarray,
  clients: Sequence[str],
  *,
  tie: float = 0.5,
) -> float:
  """Count how often the user with more of an attribute answers better (Eq. 9).

  DOA(k) is the share with g_ak > g_bk among the pairs of users (a, b) of
  different clients who both answered items with the attribute k and have
  h_ak > h_bk. So pairs with equal h do not count. Pairs with equal g count one
  half by default, so that an uninformative h gets one half; the paper's
  indicator counts them as disagreeing, `tie=0`, which costs much if answers
  have few values. The printed factor |U_c1| |U_c2| / sum I turns a mean over
  all pairs into one over those who both answered, which a ratio of counts is
  already. The printed mean divides by all attributes, ours by those with pairs.

  Args:
    hidden: h, floats `[users, attributes]`.
    answers: The users' mean answers g, `[users, attributes]`, NaN where a user
      answered no such item; see `mean_answers`.
    clients: The client of each user, `[users]`.
    tie: What a pair with equal answers counts, 0 to 1.

  Returns:
    The mean over attributes with pairs, 0 to 1; NaN if none or h is not finite.
  """
  hidden, answers = (np.asarray(x, np.float64) for x in (hidden, answers))
  if not np.isfinite(hidden).all():
    return float('nan')
  client = np.unique(clients, return_inverse=True)[1]
  shares = np.full(hidden.shape[1], np.nan)
  for k in range(hidden.shape[1]):
    is_known = ~np.isnan(answers[:, k])
    c, h, g = client[is_known], hidden[is_known, k], answers[is_known, k]
    is_pair = (h[:, np.newaxis] > h) & (c[:, np.newaxis] != c)
    agreeing = np.count_nonzero(is_pair & (g[:, np.newaxis] > g))
    tied = np.count_nonzero(is_pair & (g[:, np.newaxis] == g))
    if pairs := np.count_nonzero(is_pair):
      shares[k] = (agreeing + tie * tied) / pairs
  return _mean(shares)


def _mean(values: np.ndarray) -> float:
  """Average the values that are not NaN; return NaN if there are none."""
  known = values[~np.isnan(values)]
  return float(known.mean()) if known.size else float('nan')


# ---- attributes of one user --------------------------------------------------


def ndcg(
  hidden: np.ndarray, predicted_order: np.ndarray, *, shift: bool = True
) -> float:
  """Compare the order of predicted answers with that of h (Eq. 10).

  DCG(u) = sum_k h_uk / (log2(k) + 1), read as printed, so the first two
  attributes count 1 and 1/2, where the usual discount log2(k + 1) gives 1 and
  0.63. Attributes are in the order of the predicted mean answers, the largest
  first; equal predictions share the mean of their discounts. IDCG(u) is the
  same in the order of h itself. Attributes without a prediction are left out of
  both, as are users with nothing to rank.

  The printed formula assumes h of 0 or more: with negative h its value may be
  outside [0, 1] or have the wrong sign, as IDCG(u) may be negative. So by
  default gains are h minus the user's smallest h: then NDCG(u) is above 0 and
  at most 1, and adding a constant to all h of a user changes nothing.

  Args:
    hidden: h, floats `[users, attributes]`.
    predicted_order: The users' mean predicted answers, `[users, attributes]`,
      NaN where there is none; see `mean_answers`.
    shift: False for gains of h itself, as printed.

  Returns:
    The mean over the users who have one; NaN if none has, or h is not finite.
  """
  hidden = np.asarray(hidden, np.float64)
  if not np.isfinite(hidden).all():
    return float('nan')
  predicted_order = np.asarray(predicted_order, np.float64)
  discounts = 1.0 / (np.log2(np.arange(1, hidden.shape[1] + 1)) + 1.0)
  gains = np.full(len(hidden), np.nan)
  for user, (h, order) in enumerate(zip(hidden, predicted_order, strict=True)):
    is_known = ~np.isnan(order)
    h, order = h[is_known], order[is_known]
    if shift and h.size:
      h = h - h.min()
    ideal = np.sort(h)[::-1] @ discounts[: h.size]
    if ideal != 0.0:
      gains[user] = h @ _discounts_of(order, discounts) / ideal
  return _mean(gains)


def _discounts_of(order: np.ndarray, discounts: np.ndarray) -> np.ndarray:
  """Return each attribute's discount; equal values share their mean."""
  _, place, counts = np.unique(-order, return_inverse=True, return_counts=True)
  ends = np.cumsum(counts)
  sums = np.concatenate([[0.0], np.cumsum(discounts)])
  return ((sums[ends] - sums[ends - counts]) / counts)[place]

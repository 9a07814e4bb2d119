"""Emoticons as a stand-in for stickers, the unpublished data of FURL.

python examples/emoticons.py messages.jsonl.gz FOLDER

Reads JSON lines with an author, a time and a text. Writes the data of the task
`sticker` to FOLDER/sticker: the texts without emoticons, and whether they had
one, as a sticker that follows a message. Nothing else in a text is left out;
texts of emoticons alone are.
"""

import pathlib
import sys

import pandas as pd

EMOTICON = '|'.join(
  (
    r'(?<![\w:]):[a-z][a-z0-9_+-]*:(?![\w:])',  # :smile:
    r'(?<!\w)[:;]-?[()DP](?!\w)',  # :-)
    r'[\U0001F300-\U0001FAFF](?:\uFE0F|\u200D.)*',  # With what is joined to it.
  )
)

read = pd.read_json(sys.argv[1], lines=True, dtype=False, convert_dates=False)
texts = read['text'].str.replace(EMOTICON, '', regex=True).str.strip()
label = read['text'].str.contains(EMOTICON, regex=True).astype(int)
messages = pd.DataFrame(
  {'user': read['author'], 'time': read['time'], 'label': label, 'text': texts}
)[texts != '']
folder = pathlib.Path(sys.argv[2]) / 'sticker'
folder.mkdir(parents=True, exist_ok=True)
messages.to_json(folder / 'messages.jsonl.gz', orient='records', lines=True)
print(
  f'{len(messages):,} messages of {messages.user.nunique():,} users, '
  f'{messages.label.mean():.1%} with an emoticon'
)

"""Predictions for one user from an exported file, by the TFLite interpreter.

The user's own weights come from ratings such as --of=3,17 --are=5,2, of the
items 3 and 17. On a device, use LiteRT's interpreter.
"""

import argparse

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument('file')
parser.add_argument('--of', default='0,1', help='items that the user rated')
parser.add_argument('--are', default='5,1', help='these ratings')
parser.add_argument('--among', type=int, default=10, help='how many to rank')
arguments = parser.parse_args()
items, ratings = arguments.of.split(','), arguments.are.split(',')
if len(items) != len(ratings):
  parser.error(f'{len(items)} items have {len(ratings)} ratings.')

interpreter = tf.lite.Interpreter(arguments.file)
reconstruct = interpreter.get_signature_runner('reconstruct')
predict = interpreter.get_signature_runner('predict')
support = {'count': np.int32(len(items))}
for name, given in (('x', items), ('y', ratings)):
  details = reconstruct.get_input_details()[name]
  support[name] = np.zeros(details['shape'], details['dtype'])
  support[name].flat[: len(items)] = np.float32(given)
own = reconstruct(**support)  # It never leaves the device.
scores = predict(x=np.arange(arguments.among, dtype=np.int32), **own)
for item in np.argsort(-scores['predictions'].ravel(), kind='stable'):
  print(f'item {item}: {scores["predictions"].ravel()[item]:.3f}')

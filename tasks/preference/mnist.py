"""The MNIST preference task of FedEmbed, section 4.2.

A user likes one digit and dislikes all others, so that the same image is liked
by some users and disliked by others.

900 users of a digit with 15 liked images each need 13,500, and MNIST has some
6,000 of a digit, so images repeat between users, even between training images
of one and test images of another; within a user they never do.
"""

from tasks.emnist import images as emnist_images
from tasks.images import Images
from tasks.preference import models as preference_models
from tasks.preference.options import BALANCED
from tasks.preference.options import IMBALANCED
from tasks.preference.options import MnistOptions
from tasks.preference.task import PreferenceTask
from tasks.task import Data

# Share of the users that like each digit.
SHARES = {
  BALANCED: (0.1,) * 10,
  IMBALANCED: (0.25, 0.15, *(0.1,) * 4, *(0.05,) * 4),
}

# The paper's 900 users a digit, and a number suited to 1,797 small images.
_PAPER_USERS, _FEW_USERS = 9_000, 300


class MnistPreference(PreferenceTask):
  """Users as clients; each likes one digit."""

  name = MnistOptions.name

  def __init__(self, images: Images, options: MnistOptions, seed: int):
    is_mnist = len(images) >= _PAPER_USERS
    super().__init__(
      images,
      SHARES[options.shares],
      _PAPER_USERS if is_mnist else _FEW_USERS,
      options,
      seed,
      build_encoder=preference_models.build_encoder,
    )


def load(options: MnistOptions, data: Data, seed: int) -> MnistPreference:
  """Load the images and make the task.

  Images are in the folder `emnist` below `data_dir`, of which the training
  images are used. Synthetic are the small digits of scikit-learn.
  """
  if data.is_synthetic:
    images = emnist_images.load_digits()
  else:
    images = emnist_images.load_mnist(data.data_dir)
  return MnistPreference(images, options, seed)

"""The MNIST preference task of FedEmbed, section 4.2.

A user likes one digit and dislikes all others, so that the same image is liked
by some users and disliked by others.

900 users of a digit with 15 liked images each need 13,500, and MNIST has some
6,000 of a digit, so images repeat from user to user, also between what one
trains with and another is tested on; within a user they never do. Without
`repeat_images` every image is used at most once in all, which suits fewer
users: then no test image was trained on by anybody.
"""

from tasks import emnist_images
from tasks import preference_models
from tasks.preference_task import BALANCED
from tasks.preference_task import IMBALANCED
from tasks.preference_task import Options
from tasks.preference_task import PreferenceTask

NAME = 'mnist_preference'

# The share of the users that like each digit.
SHARES = {
  BALANCED: (0.1,) * 10,
  IMBALANCED: (0.25, 0.15, *(0.1,) * 4, *(0.05,) * 4),
}

# The paper's 900 a digit, and as many as suit 1,797 small images.
_PAPER_USERS, _FEW_USERS = 9_000, 300


class MnistPreference(PreferenceTask):
  """Users as clients, who like one digit each."""

  name = NAME

  def __init__(self, images: emnist_images.Images, options: Options, seed: int):
    """Draws the users' images.

    Args:
      images: All images.
      options: What can be chosen.
      seed: The run's seed: images are drawn by it, and the weights start from
        it.

    Raises:
      OptionError: If there are too few images or users.
    """
    is_mnist = len(images) >= _PAPER_USERS
    super().__init__(
      images,
      SHARES[options.shares],
      _PAPER_USERS if is_mnist else _FEW_USERS,
      options,
      seed,
      build_encoder=preference_models.build_encoder,
    )


def load(
  *, data: str, data_dir: str | None, seed: int, options: Options
) -> MnistPreference:
  """Loads the images and makes the task.

  Args:
    data: 'real' for the 60,000 training images of MNIST, or 'synthetic' for
      the small digits of scikit-learn, which need no files.
    data_dir: The folder that holds `emnist`, or is it.
    seed: The run's seed.
    options: What can be chosen about the task.

  Raises:
    DataError: If the data are missing or damaged; says where and what to do.
    OptionError: If there are too few images for the users.
  """
  if data == 'synthetic':
    images = emnist_images.load_digits()
  else:
    images = emnist_images.load_mnist(data_dir)
  return MnistPreference(images, options, seed)

from .pricing import Costs as Costs
from .trees import Distribution as Distribution
from .engine import Engine as Engine
from .trees import Forest as Forest
from .errors import InputError as InputError
from .trees import Layout as Layout
from .trees import MicroBatch as MicroBatch
from .trees import Plan as Plan
from .trees import RankShare as RankShare
from .report import Report as Report
from .step import Step as Step
from .rows.files import Trajectories as Trajectories
from .trees import build as build
from .pricing import costs as costs
from .trees import distribute as distribute
from . import distributed as distributed
from . import hf as hf
from .report import inspect as inspect
from . import io as io
from . import ops as ops
from .trees import plan as plan
from .rows.files import read as read
from .rows.files import trajectories as trajectories
from . import trl as trl
from .rows.files import write as write

__version__: str

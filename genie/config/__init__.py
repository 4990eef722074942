"""The settings of this machine: declared once in sections.py, read and validated by loading.py.

Only this package reads the environment.
"""

from __future__ import annotations

from genie.config.loading import OTHER_ENVIRONMENT_VARIABLES as OTHER_ENVIRONMENT_VARIABLES
from genie.config.loading import VARIABLES_INHERITED_BY_JOBS as VARIABLES_INHERITED_BY_JOBS
from genie.config.loading import Setting as Setting
from genie.config.loading import cache_home as cache_home
from genie.config.loading import cluster_settings_from_arguments as cluster_settings_from_arguments
from genie.config.loading import cxx_command as cxx_command
from genie.config.loading import environment_for_command as environment_for_command
from genie.config.loading import environment_for_jobs as environment_for_jobs
from genie.config.loading import environment_variables as environment_variables
from genie.config.loading import list_settings as list_settings
from genie.config.loading import load as load
from genie.config.loading import set_compiler_cache_dir as set_compiler_cache_dir
from genie.config.sections import ALIASES as ALIASES
from genie.config.sections import SECTIONS as SECTIONS
from genie.config.sections import AgentConfig as AgentConfig
from genie.config.sections import ClusterConfig as ClusterConfig
from genie.config.sections import ControllerConfig as ControllerConfig
from genie.config.sections import GossipConfig as GossipConfig
from genie.config.sections import GridConfig as GridConfig
from genie.config.sections import LogConfig as LogConfig
from genie.config.sections import PathsConfig as PathsConfig
from genie.config.sections import Settings as Settings
from genie.config.sections import WorkdirConfig as WorkdirConfig

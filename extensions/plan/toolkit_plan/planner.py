"""The functions of :class:`toolkit.planning.planner.Planner`, each imported on first use."""

from toolkit.extension import import_by_name

_MODULES = {
    "by_memory": ("resolve_by_memory", "choose_accumulate"),
    "compile_time": ("choose_compiler",),
    "plan": ("require_memory", "plan_run", "plan_options"),
    "advice": ("out_of_memory",),
    "dry_run": ("report_dry_run",),
}
__getattr__ = import_by_name(
    __name__, {name: f"toolkit_plan.{module}.{name}" for module, names in _MODULES.items() for name in names}
)

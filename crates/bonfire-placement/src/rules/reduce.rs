//! Reductions: of the shared dim each rank gives its part of the result, of another its rows.

use super::{Operand, Plan, Reduction};
use crate::{PartialOp, Placement};

/// `None` if there is no such dim.
pub(super) fn along(operand: Operand<'_>, dim: usize, reduction: Reduction) -> Option<Plan> {
    (dim < operand.shape.len()).then(|| plan(operand, reduction, |shared| shared == dim))
}

pub(super) fn all(operand: Operand<'_>, reduction: Reduction) -> Plan {
    plan(operand, reduction, |_| true)
}

fn plan(operand: Operand<'_>, reduction: Reduction, is_reduced: impl Fn(usize) -> bool) -> Plan {
    let output = match (operand.shard(), operand.placement) {
        (Some((dim, _)), _) if is_reduced(dim) => reduction.partial(),
        (Some(_), kept) => Some(kept.clone()),
        // The sum of the parts' sums; their maxima, say, do not add up.
        (None, Placement::Partial { op: PartialOp::Sum }) if reduction.is_linear() => reduction.partial(),
        (None, Placement::Local | Placement::Fill | Placement::Replicate) => None,
        (None, Placement::Shard { .. } | Placement::Partial { .. }) => None,
    };
    Plan::in_place(operand, output)
}

//! Reductions: of the shared dim each rank gives its part of the result, of another its rows.

use super::{Operand, Plan, Reduction, Sharing, aligned};
use crate::{PartialOp, Placement, PlacementError};

/// Where parts of the shared dim do not combine, the ranks share another. `None` if there is no such dim.
pub(super) fn along(
    operand: Operand<'_>,
    dim: usize,
    reduction: Reduction,
    sharing: Sharing<'_>,
) -> Result<Option<Plan>, PlacementError> {
    if dim >= operand.shape.len() {
        return Ok(None);
    }
    match output(operand, reduction, |shared| shared == dim) {
        Some(output) => Ok(Some(Plan::in_place(operand, Some(output)))),
        None => aligned::step_aside(&[operand], &[dim], 1, sharing).map(Some),
    }
}

pub(super) fn all(operand: Operand<'_>, reduction: Reduction) -> Plan {
    Plan::in_place(operand, output(operand, reduction, |_| true))
}

/// What comes of the operand where it is; `None` if it must be somewhere else.
fn output(operand: Operand<'_>, reduction: Reduction, is_reduced: impl Fn(usize) -> bool) -> Option<Placement> {
    match (operand.shard(), operand.placement) {
        (Some((dim, _)), _) if is_reduced(dim) => reduction.partial(),
        (Some(_), kept) => Some(kept.clone()),
        // The sum of the parts' sums; their maxima, say, do not add up.
        (None, Placement::Partial { op: PartialOp::Sum }) if reduction.is_linear() => reduction.partial(),
        (None, Placement::Local | Placement::Fill | Placement::Replicate) => None,
        (None, Placement::Shard { .. } | Placement::Partial { .. }) => None,
    }
}

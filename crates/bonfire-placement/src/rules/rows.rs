use super::{Operand, Plan, Sharing};
use crate::{PartialOp, Placement, PlacementError};

/// Each rank computes the same rows, which lie along another dim in each operand.
///
/// The largest operand that shares its rows stays. Without one, rows are shared by shares if any dim of an operand was
/// shared, else everything is replicated. `None` if the operands have different numbers of rows.
pub(super) fn plan(
    operands: &[Operand<'_>],
    inputs: &[Option<usize>],
    outputs: &[Option<usize>],
    sharing: Sharing<'_>,
) -> Result<Option<Plan>, PlacementError> {
    let with_rows = || operands.iter().zip(inputs).filter_map(|(operand, dim)| dim.map(|dim| (operand, dim)));
    let mut nums_rows = with_rows().map(|(operand, dim)| operand.shape.get(dim));
    let first = nums_rows.next().flatten();
    if nums_rows.any(|num_rows| num_rows != first) || with_rows().next().is_some() && first.is_none() {
        return Ok(None);
    }
    let shared = with_rows().filter_map(|(operand, dim)| match operand.shard() {
        Some((shared, lengths)) if shared == dim => Some((operand.num_elements(), lengths)),
        Some(_) | None => None,
    });
    let largest = shared.reduce(|largest, next| if next.0 > largest.0 { next } else { largest });
    let was_shared = || operands.iter().any(|operand| operand.shard().is_some());
    let lengths = match (largest, first) {
        (Some((_, lengths)), _) => lengths.clone(),
        (None, Some(&num_rows)) if num_rows > 1 && was_shared() => sharing.lengths(num_rows)?,
        (None, _) => return Ok(Some(Plan::replicate(operands.len(), outputs.len()))),
    };
    let rows = |dim: usize| Placement::shard(dim, lengths.clone());
    Ok(Some(Plan {
        inputs: inputs.iter().map(|dim| dim.map_or(Placement::Replicate, rows)).collect(),
        outputs: outputs.iter().map(|dim| dim.map_or(Placement::Partial { op: PartialOp::Sum }, rows)).collect(),
    }))
}

use super::{Operand, Plan, driver};
use crate::Placement;

/// Each rank computes its rows of one unblocked dim that lines up in all operands.
///
/// The largest shard stays where it is: the activation rather than what is broadcast onto it.
pub(super) fn plan(operands: &[Operand<'_>], blocked: &[usize], num_outputs: usize) -> Plan {
    let can_share = |dim, length| {
        let lines_up = |operand: &Operand<'_>| match operand.shape.get(dim) {
            Some(&other) => other == length || other == 1,
            None => true,
        };
        !blocked.contains(&dim) && operands.iter().all(lines_up)
    };
    match driver(operands.iter().copied(), can_share) {
        Some((dim, lengths)) => Plan {
            inputs: operands.iter().map(|operand| operand.beside(dim, lengths)).collect(),
            outputs: vec![Placement::shard(dim, lengths.clone()); num_outputs],
        },
        None => Plan::replicate(operands.len(), num_outputs),
    }
}

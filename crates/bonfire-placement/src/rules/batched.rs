use super::{Operand, Plan, Role, Sharing, Yield, driver};
use crate::{Lengths, PartialOp, Placement, PlacementError};

/// Each rank computes its rows of one of `dims`.
///
/// It is the dim that the largest split operand shares already, or else the first that is long enough, by shares: this
/// is how a `Local` or `Replicate` activation gets spread over its batch.
pub(super) struct Batched<'a> {
    pub(super) operands: &'a [Operand<'a>],
    pub(super) dims: &'a [usize],
    /// One per operand.
    pub(super) roles: &'a [Role],
    pub(super) outputs: &'a [Yield],
}

impl<'a> Batched<'a> {
    pub(super) fn plan(&self, sharing: Sharing<'_>) -> Result<Plan, PlacementError> {
        if self.outputs.contains(&Yield::Whole) {
            return Ok(self.replicate());
        }
        if let Some((dim, lengths)) = driver(self.split(), |dim, length| self.can_share(dim, length)) {
            return Ok(self.share(dim, lengths));
        }
        let Some(first) = self.split().next() else {
            return Ok(self.replicate());
        };
        let length = |dim: usize| first.shape.get(dim).copied().unwrap_or(0);
        match self.dims.iter().find(|&&dim| self.can_share(dim, length(dim))) {
            Some(&dim) => Ok(self.share(dim, &sharing.lengths(length(dim))?)),
            None => Ok(self.replicate()),
        }
    }

    fn can_share(&self, dim: usize, length: usize) -> bool {
        let lines_up = |operand: Operand<'_>| match operand.shape.get(dim) {
            Some(&other) => other == length || other == 1,
            None => false,
        };
        length > 1 && self.dims.contains(&dim) && self.split().all(lines_up)
    }

    fn split(&self) -> impl Iterator<Item = Operand<'a>> {
        let operands = self.operands.iter().zip(self.roles);
        operands.filter(|(_, role)| **role == Role::Split).map(|(operand, _)| *operand)
    }

    fn share(&self, dim: usize, lengths: &Lengths) -> Plan {
        let input = |(operand, role): (&Operand<'_>, &Role)| match role {
            Role::Split => operand.beside(dim, lengths),
            Role::Whole => Placement::Replicate,
        };
        let output = |output: &Yield| match output {
            Yield::Split => Placement::shard(dim, lengths.clone()),
            Yield::Sum => Placement::Partial { op: PartialOp::Sum },
            Yield::Whole => Placement::Replicate,
        };
        Plan {
            inputs: self.operands.iter().zip(self.roles).map(input).collect(),
            outputs: self.outputs.iter().map(output).collect(),
        }
    }

    fn replicate(&self) -> Plan {
        Plan::replicate(self.operands.len(), self.outputs.len())
    }
}

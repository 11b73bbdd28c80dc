use super::{Operand, Plan, Sharing};
use crate::{Lengths, PartialOp, Placement, PlacementError};

/// `[.., m, k] x [.., k, n]`.
///
/// In order, so that the activation stays where it is:
///
/// | lhs shares | rhs shares | lhs becomes | rhs becomes | output |
/// |---|---|---|---|---|
/// | rows, or a batch dim | anything | stays | whole, or the same batch dim | the same dim |
/// | k | nothing, or less than lhs has | stays | k | Partial |
/// | k or nothing | k | k | stays | Partial |
/// | k or nothing | columns, or a batch dim | whole, or the same batch dim | stays | the same dim |
/// | nothing | nothing | dim 0, by shares | whole, or the same batch dim | dim 0 |
///
/// Where both are sharded and lhs does not decide alone, the smaller operand moves (rhs, if they are equal).
pub(super) struct Matmul<'a> {
    lhs: Operand<'a>,
    rhs: Operand<'a>,
    /// The dim of lhs's rows and of rhs's k; the dims before it are batch dims.
    rows: usize,
    /// The dim of lhs's k and of rhs's columns.
    cols: usize,
}

impl<'a> Matmul<'a> {
    /// `None` if the shapes cannot be multiplied.
    pub(super) fn new(lhs: Operand<'a>, rhs: Operand<'a>) -> Option<Self> {
        let cols = lhs.shape.len().checked_sub(1)?;
        let rows = cols.checked_sub(1)?;
        let mut batches = lhs.shape[..rows].iter().zip(rhs.shape);
        let fits = rhs.shape.len() == lhs.shape.len()
            && lhs.shape[cols] == rhs.shape[rows]
            && batches.all(|(&lhs, &rhs)| lhs == rhs || lhs == 1 || rhs == 1);
        fits.then_some(Matmul { lhs, rhs, rows, cols })
    }

    pub(super) fn plan(&self, sharing: Sharing<'_>) -> Result<Plan, PlacementError> {
        let lhs_is_larger = || self.lhs.num_elements() >= self.rhs.num_elements();
        match (self.lhs.shard(), self.rhs.shard()) {
            (Some((dim, lengths)), _) if dim != self.cols => Ok(self.keep_lhs(dim, lengths)),
            (Some((_, lengths)), None) => Ok(self.contract(lengths)),
            (Some((_, lengths)), Some(_)) if lhs_is_larger() => Ok(self.contract(lengths)),
            (_, Some((dim, lengths))) if dim == self.rows => Ok(self.contract(lengths)),
            (_, Some((dim, lengths))) => Ok(self.keep_rhs(dim, lengths)),
            (None, None) if self.lhs.shape[0] > 1 => Ok(self.keep_lhs(0, &sharing.lengths(self.lhs.shape[0])?)),
            (None, None) => Ok(Plan::replicate(2, 1)),
        }
    }

    /// Each rank has rows of lhs, or some matrices of the batch.
    fn keep_lhs(&self, dim: usize, lengths: &Lengths) -> Plan {
        let shard = Placement::shard(dim, lengths.clone());
        let rhs = if dim == self.rows { Placement::Replicate } else { self.rhs.beside(dim, lengths) };
        Plan { inputs: vec![shard.clone(), rhs], outputs: vec![shard] }
    }

    /// Each rank has columns of rhs, or some matrices of the batch.
    fn keep_rhs(&self, dim: usize, lengths: &Lengths) -> Plan {
        let shard = Placement::shard(dim, lengths.clone());
        let lhs = if dim == self.cols { Placement::Replicate } else { self.lhs.beside(dim, lengths) };
        Plan { inputs: vec![lhs, shard.clone()], outputs: vec![shard] }
    }

    /// Each rank has a part of k, and so of each sum: the gradient of a weight.
    fn contract(&self, lengths: &Lengths) -> Plan {
        Plan {
            inputs: vec![Placement::shard(self.cols, lengths.clone()), Placement::shard(self.rows, lengths.clone())],
            outputs: vec![Placement::Partial { op: PartialOp::Sum }],
        }
    }
}

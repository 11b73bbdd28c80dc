//! What a call demands of its arguments, checked before another rank is involved.

use crate::{Buffer, BufferMut, Collective, CollectiveError, DType, ReduceOp};

/// One call on one rank, as errors name it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) collective: Collective,
}

impl Call {
    /// Checks that `op` can reduce every dtype.
    pub(crate) fn check_reducible(
        self,
        op: ReduceOp,
        dtypes: impl IntoIterator<Item = DType>,
    ) -> Result<(), CollectiveError> {
        let Self { rank, world_size, collective } = self;
        match dtypes.into_iter().find(|&dtype| !op.supports(dtype)) {
            None => Ok(()),
            Some(dtype) => Err(CollectiveError::UnsupportedReduction { rank, world_size, collective, op, dtype }),
        }
    }

    /// Checks that the segments, the whole of them all and this rank's own fit together.
    pub(crate) fn check_segments(
        self,
        lengths: &[usize],
        whole: (&'static str, usize),
        own: (&'static str, usize),
    ) -> Result<(), CollectiveError> {
        self.check_length("lengths (ranks)", lengths.len(), self.world_size)?;
        // A sum past usize::MAX cannot be the length of a buffer, nor can usize::MAX.
        let total = lengths.iter().fold(0, |sum: usize, &length| sum.saturating_add(length));
        self.check_length(whole.0, whole.1, total)?;
        self.check_length(own.0, own.1, lengths[self.rank])
    }

    /// Checks that an argument has the length it must have.
    pub(crate) fn check_length(
        self,
        argument: &'static str,
        actual: usize,
        expected: usize,
    ) -> Result<(), CollectiveError> {
        let Self { rank, world_size, collective } = self;
        if actual == expected {
            Ok(())
        } else {
            Err(CollectiveError::WrongLength { rank, world_size, collective, argument, actual, expected })
        }
    }

    /// Checks that what is read and what is written are of one dtype.
    pub(crate) fn check_one_dtype(self, input: Buffer<'_>, output: &BufferMut<'_>) -> Result<(), CollectiveError> {
        let Self { rank, world_size, collective } = self;
        let (input, output) = (input.dtype(), output.dtype());
        if input == output {
            Ok(())
        } else {
            Err(CollectiveError::WrongDType { rank, world_size, collective, input, output })
        }
    }

    /// Checks that `value` is a rank, and another one where a call needs two.
    pub(crate) fn check_rank(self, argument: &'static str, value: usize) -> Result<(), CollectiveError> {
        let Self { rank, world_size, collective } = self;
        if value < world_size && !(collective.is_point_to_point() && value == rank) {
            Ok(())
        } else {
            Err(CollectiveError::WrongRank { rank, world_size, collective, argument, value })
        }
    }
}

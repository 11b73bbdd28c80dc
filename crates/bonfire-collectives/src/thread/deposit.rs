//! What a rank brings to a collective, and what must be equal on all ranks.

use core::{any::TypeId, fmt, ptr};

use crate::{Buffer, BufferMut, Collective, DType, ReduceOp};

/// One rank's part of one collective, on that rank's stack for as long as the others may look at it.
pub(super) struct Deposit<'a> {
    pub(super) collective: Collective,
    pub(super) op: Option<ReduceOp>,
    /// The root of a broadcast, the other rank of a send or recv.
    pub(super) other: Option<usize>,
    /// Elements per rank, of a reduce_scatter or all_gather.
    pub(super) lengths: &'a [usize],
    /// What others only read.
    pub(super) inputs: &'a [Buffer<'a>],
    /// What others may write.
    pub(super) outputs: &'a [BufferMut<'a>],
    /// What is handed over by pointer.
    pub(super) handed: Option<Handed>,
}

/// A value of a type that only the calls know, to be handed over by pointer.
pub(super) struct Handed {
    pub(super) name: &'static str,
    pub(super) type_id: TypeId,
    pub(super) type_name: &'static str,
    /// The value: its type is named by `type_id`, and is the same on every rank of a committed round.
    pub(super) value: *const (),
    /// Where this rank wants its result, of a type that follows from the value's.
    pub(super) result: *mut (),
}

impl Deposit<'_> {
    /// A collective with nothing in it.
    pub(super) const fn of(collective: Collective) -> Self {
        Self { collective, op: None, other: None, lengths: &[], inputs: &[], outputs: &[], handed: None }
    }

    /// The rank this one sends to or receives from.
    pub(super) const fn partner(&self) -> Option<usize> {
        if self.collective.is_point_to_point() { self.other } else { None }
    }

    /// Whether this is one half of a transfer between two ranks and `other` is the other half.
    pub(super) const fn completes(&self, other: &Self) -> bool {
        matches!(
            (self.collective, other.collective),
            (Collective::Send, Collective::Recv) | (Collective::Recv, Collective::Send)
        )
    }

    /// The bytes that the work is about, the same on every rank of a committed round.
    pub(super) fn num_bytes(&self) -> usize {
        (0..self.num_alike()).map(|index| self.alike(index)).map(|(dtype, n)| dtype.size_bytes() * n).sum()
    }

    /// What this and `other` say where they first differ, for two ranks of one collective.
    pub(super) fn difference(&self, other: &Self) -> Option<(String, String)> {
        let same_terms = self.collective == other.collective
            && self.op == other.op
            && self.other == other.other
            && self.handed.as_ref().map(Handed::terms) == other.handed.as_ref().map(Handed::terms);
        if !same_terms {
            return Some((self.to_string(), other.to_string()));
        }
        if self.lengths != other.lengths {
            return Some((format!("lengths {:?}", self.lengths), format!("lengths {:?}", other.lengths)));
        }
        self.buffer_difference(other)
    }

    /// As [`difference`](Self::difference), looking at the buffers alone.
    pub(super) fn buffer_difference(&self, other: &Self) -> Option<(String, String)> {
        let (ours, theirs) = (self.num_alike(), other.num_alike());
        if ours != theirs {
            return Some((format!("a list of {ours} buffers"), format!("a list of {theirs} buffers")));
        }
        let index = (0..ours).find(|&index| self.alike(index) != other.alike(index))?;
        let describe = |(dtype, num_elements): (DType, usize)| {
            format!("{num_elements} {dtype} elements in buffer {index} of {ours}")
        };
        Some((describe(self.alike(index)), describe(other.alike(index))))
    }

    /// The number of buffers that are alike on every rank.
    const fn num_alike(&self) -> usize {
        if self.compares_inputs() { self.inputs.len() } else { self.outputs.len() }
    }

    /// Dtype and elements of a buffer that is alike on every rank.
    const fn alike(&self, index: usize) -> (DType, usize) {
        if self.compares_inputs() {
            (self.inputs[index].dtype(), self.inputs[index].num_elements())
        } else {
            (self.outputs[index].dtype(), self.outputs[index].num_elements())
        }
    }

    /// Whether inputs are alike on every rank, rather than outputs.
    const fn compares_inputs(&self) -> bool {
        match self.collective {
            Collective::ReduceScatter | Collective::Send => true,
            Collective::AllReduce
            | Collective::AllGather
            | Collective::Broadcast
            | Collective::Barrier
            | Collective::Recv
            | Collective::Exchange => false,
        }
    }
}

impl Handed {
    pub(super) fn new<V: 'static, R>(name: &'static str, value: *const V, result: &mut R) -> Self {
        Self {
            name,
            type_id: TypeId::of::<V>(),
            type_name: core::any::type_name::<V>(),
            value: value.cast(),
            result: ptr::from_mut(result).cast(),
        }
    }

    fn terms(&self) -> (&'static str, TypeId) {
        (self.name, self.type_id)
    }
}

impl fmt::Display for Deposit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.collective)?;
        if let Some(op) = self.op {
            write!(f, " of {op}")?;
        }
        if let Some(other) = self.other {
            let role = match self.collective {
                Collective::Send => "to",
                Collective::Recv => "from",
                _ => "with root",
            };
            write!(f, " {role} {other}")?;
        }
        if let Some(handed) = &self.handed {
            write!(f, " of {:?} ({})", handed.name, handed.type_name)?;
        }
        Ok(())
    }
}

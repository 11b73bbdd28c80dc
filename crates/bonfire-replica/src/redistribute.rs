//! From one placement to another: which parts a task reads, and the tasks that make them.

use std::sync::{Arc, Mutex, PoisonError};

use bonfire_collectives::{CollectiveError, ReduceOp};
use bonfire_placement::{PartialOp, Placement, Redistribution, redistribute};
use burn_backend::{DType, Scalar, Shape};

use crate::{
    Member,
    balance::Cost,
    group::{MemberContext, Order, Task},
    memory::MemoryKind,
    random::Draw,
    tensor::{Fill, Origin, Parts, Reading, Storage, Tensor},
    value::Value,
};

/// Where a task finds an input.
pub(crate) enum Source<B: Member> {
    Parts {
        parts: Arc<Parts<B>>,
        reading: Reading,
        /// For a tensor that is stored smaller than it is.
        expansion: Option<Expansion>,
    },
    /// Made on the spot by each member.
    Fill { fill: Fill<B>, whole: Whole, dtype: DType },
}

/// A global shape, and how the members share it.
pub(crate) struct Whole {
    shape: Shape,
    placement: Placement,
}

impl Whole {
    fn local_shape(&self, rank: usize) -> Shape {
        Shape::from(self.placement.local_shape(&self.shape, rank))
    }
}

/// How a member gets its part of a tensor from a smaller stored one.
pub(crate) struct Expansion {
    to: Whole,
    /// Repeated without a copy: for those that broadcast anyway.
    is_view: bool,
}

impl<B: Member> Source<B> {
    /// As it is, but a stored value that is smaller is only viewed as a larger one.
    pub(crate) fn viewed(mut self) -> Self {
        if let Source::Parts { expansion: Some(expansion), .. } = &mut self {
            expansion.is_view = true;
        }
        self
    }

    /// What a product uses whole, beside what the members share, is a parameter.
    pub(crate) fn note_parameter(&self) {
        if let Source::Parts { parts, .. } = self
            && parts.kind().may_be_parameter()
        {
            parts.set_kind(MemoryKind::Parameters);
        }
    }

    pub(crate) fn fetch(&self, member: &MemberContext<B>) -> Value<B> {
        match self {
            Source::Parts { parts, reading, expansion: None } => parts.read(member, *reading),
            Source::Parts { parts, reading, expansion: Some(expansion) } => {
                let stored = parts.read(member, *reading);
                let view = stored.expanded(expansion.to.local_shape(member.rank));
                if expansion.is_view { view } else { B::move_to(view, &member.device) }
            }
            Source::Fill { fill, whole, dtype } => {
                (fill.full)(whole.local_shape(member.rank), fill.value, &member.device, *dtype)
            }
        }
    }
}

impl<B: Member> Order<'_, B> {
    /// Gives up one handle of `tensor` and says where its parts in `placement` will be, after enqueueing the task that
    /// makes them if nobody has needed that form before. `moving` says whether that task may use up the parts it starts
    /// from when this is the last handle.
    pub(crate) fn source(&self, tensor: Tensor<B>, placement: &Placement, moving: Reading) -> Source<B> {
        let (stored, is_expanded) = (tensor.stored_placement(placement), tensor.is_expanded());
        let Tensor { shape, storage, .. } = tensor;
        let whole = Whole { shape, placement: placement.clone() };
        if let Some(fill) = storage.as_fill() {
            return Source::Fill { fill, whole, dtype: storage.dtype };
        }
        // Handles are given up under the order lock, so whoever sees none left is the last to enqueue.
        let (parts, reading) = match Arc::try_unwrap(storage) {
            Ok(storage) => (self.parts(&storage, &stored, moving), Reading::Take),
            Err(storage) => (self.parts(&storage, &stored, Reading::Share), Reading::Share),
        };
        Source::Parts { parts, reading, expansion: is_expanded.then_some(Expansion { to: whole, is_view: false }) }
    }

    fn parts(&self, storage: &Storage<B>, placement: &Placement, reading: Reading) -> Arc<Parts<B>> {
        if let Some(parts) = storage.form(placement) {
            return parts;
        }
        let parts = Parts::new(&self.group.memory, storage.form_kind(placement));
        // A replicated form is the cheapest to start from: slicing it moves nothing.
        let replicated = storage.form(&Placement::Replicate).map(|parts| (Placement::Replicate, parts));
        let own = || storage.form(&storage.placement).map(|parts| (storage.placement.clone(), parts));
        let task: Arc<dyn Task<B>> = match replicated.or_else(own) {
            Some((from, source)) => Arc::new(RedistributeTask {
                how: redistribute(&from, placement).expect("rules ask for legal moves only"),
                from,
                to: placement.clone(),
                source,
                reading,
                target: parts.clone(),
            }),
            None => match storage.origin().expect("a tensor is at home or has parts") {
                Origin::Value(value) => Arc::new(SpreadTask::new(value, placement, parts.clone())),
                Origin::Draw(draw) => Arc::new(DrawTask {
                    draw: draw.clone(),
                    shape: storage.shape.clone(),
                    placement: placement.clone(),
                    target: parts.clone(),
                }),
            },
        };
        self.enqueue(task);
        storage.keep_form(placement.clone(), parts.clone());
        storage.count_home(&self.group.memory);
        parts
    }
}

/// Which sums are formed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Only those that are asked for, by what uses them beside something sharded: batch statistics.
    These,
    /// Only those that are asked for, to be read.
    Read,
    /// All that the calling thread has pending: the first gradient that an optimizer reads brings all others.
    AllPending,
}

impl<B: Member> Order<'_, B> {
    /// Forms sums in one collective, whatever their number, so that each has a replicated form.
    ///
    /// # Panics
    ///
    /// As [`enqueue`](Self::enqueue).
    pub(crate) fn form_sums<'t>(&self, asked: impl Iterator<Item = &'t Arc<Storage<B>>>, scope: Scope)
    where
        B: 't,
    {
        let is_wanted = |storage: &&Arc<Storage<B>>| storage.is_open() || storage.form(&Placement::Replicate).is_none();
        let mut storages: Vec<Arc<Storage<B>>> =
            asked.filter(|storage| storage.as_sum().is_some()).filter(is_wanted).cloned().collect();
        if storages.is_empty() {
            return;
        }
        let open = || storages.iter().filter(|storage| storage.is_open()).filter_map(|storage| storage.as_sum());
        let mut with_gradients = scope == Scope::Read;
        if scope == Scope::AllPending && open().next().is_some() {
            let pending = &self.group.pending;
            let others = pending.take_early(open()).unwrap_or_else(|| {
                with_gradients = true;
                pending.take()
            });
            storages.extend(others.into_iter().filter(|storage| storage.is_open()));
        }
        let is_gradient =
            |storage: &Arc<Storage<B>>| storage.is_open() && storage.as_sum().is_some_and(|sum| !sum.is_statistic());
        let ends_step = scope == Scope::AllPending && storages.iter().any(is_gradient);
        let mut sums = Vec::with_capacity(storages.len());
        for storage in &storages {
            // Another thread may have read the value before: then it has been summed already.
            if storage.form(&Placement::Replicate).is_none() {
                let (source, reading) = storage.parts_to_sum();
                // What an optimizer has formed, or a reader, is a gradient, though that of a scale looks like a statistic;
                // a loss is none.
                let is_gradient = with_gradients && storage.shape.num_elements() > 1;
                let kind = if is_gradient { MemoryKind::Gradients } else { source.kind() };
                let target = Parts::new(&self.group.memory, kind);
                storage.keep_form(Placement::Replicate, target.clone());
                sums.push(PartsToSum { source, reading, target });
            }
            storage.settle();
        }
        if !sums.is_empty() {
            self.enqueue(Arc::new(SumTask { sums }));
        }
        if ends_step {
            self.end_step();
        }
    }
}

struct PartsToSum<B: Member> {
    source: Arc<Parts<B>>,
    reading: Reading,
    target: Arc<Parts<B>>,
}

/// One multi-tensor all_reduce.
struct SumTask<B: Member> {
    sums: Vec<PartsToSum<B>>,
}

impl<B: Member> Task<B> for SumTask<B> {
    fn operation(&self) -> &'static str {
        "all_reduce"
    }

    fn cost(&self, _rank: usize) -> Cost {
        Cost::Collective
    }

    fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError> {
        let parts = self.sums.iter().map(|sum| sum.source.read(member, sum.reading)).collect();
        let values = B::all_reduce(parts, ReduceOp::Sum, &member.communicator)?;
        for (sum, value) in self.sums.iter().zip(values) {
            sum.target.set(member, value);
        }
        Ok(())
    }
}

/// Brings a value of the home device to the members, whole or in parts.
struct SpreadTask<B: Member> {
    /// Cut on the caller's thread, since the home device is the caller's.
    pieces: Vec<Mutex<Option<Value<B>>>>,
    /// Of the largest piece.
    bytes: usize,
    placement: Placement,
    target: Arc<Parts<B>>,
}

impl<B: Member> SpreadTask<B> {
    fn new(value: &Value<B>, placement: &Placement, target: Arc<Parts<B>>) -> Self {
        let pieces: Vec<Value<B>> = (0..target.num_members())
            .map(|rank| match placement {
                Placement::Shard { dim, lengths } => value.clone().narrow(*dim, lengths.range(rank)),
                Placement::Replicate => value.clone(),
                Placement::Local | Placement::Fill | Placement::Partial { .. } => {
                    panic!("no rule spreads a tensor to {placement}")
                }
            })
            .collect();
        let bytes = pieces.iter().map(num_bytes).max().unwrap_or(0);
        let pieces = pieces.into_iter().map(|piece| Mutex::new(Some(piece))).collect();
        Self { pieces, bytes, placement: placement.clone(), target }
    }
}

impl<B: Member> Task<B> for SpreadTask<B> {
    fn operation(&self) -> &'static str {
        "spread"
    }

    fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError> {
        let piece = self.pieces[member.rank].lock().unwrap_or_else(PoisonError::into_inner).take();
        let piece = piece.expect("each member takes its piece once");
        self.target.set(member, B::move_to(piece, &member.device));
        Ok(())
    }

    fn carried_bytes(&self) -> usize {
        self.bytes
    }

    fn cost(&self, rank: usize) -> Cost {
        Cost::of([&self.placement], rank)
    }
}

/// Each member draws its own part.
struct DrawTask<B: Member> {
    draw: Draw,
    /// Of the whole.
    shape: Shape,
    placement: Placement,
    target: Arc<Parts<B>>,
}

impl<B: Member> Task<B> for DrawTask<B> {
    fn operation(&self) -> &'static str {
        "draw"
    }

    fn cost(&self, rank: usize) -> Cost {
        Cost::of([&self.placement], rank)
    }

    fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError> {
        let part = self.draw.part(&self.shape, &self.placement, member.rank, &member.device);
        self.target.set(member, part);
        Ok(())
    }
}

fn num_bytes<B: Member>(value: &Value<B>) -> usize {
    value.shape().num_elements() * value.dtype().size()
}

/// Makes the parts of one placement from those of another.
struct RedistributeTask<B: Member> {
    how: Redistribution,
    from: Placement,
    to: Placement,
    source: Arc<Parts<B>>,
    reading: Reading,
    target: Arc<Parts<B>>,
}

impl<B: Member> Task<B> for RedistributeTask<B> {
    fn operation(&self) -> &'static str {
        match self.how {
            Redistribution::Keep => "keep",
            Redistribution::Spread => "spread",
            Redistribution::Slice => "slice of a replicated tensor",
            Redistribution::AllGather => "all_gather",
            Redistribution::AllReduce => "all_reduce",
            Redistribution::ReduceScatter => "reduce_scatter",
            Redistribution::AllToAll => "all_to_all",
        }
    }

    fn cost(&self, rank: usize) -> Cost {
        match self.how {
            Redistribution::Keep | Redistribution::Spread | Redistribution::Slice => Cost::of([&self.to], rank),
            Redistribution::AllGather
            | Redistribution::AllReduce
            | Redistribution::ReduceScatter
            | Redistribution::AllToAll => Cost::Collective,
        }
    }

    fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError> {
        let part = self.source.read(member, self.reading);
        let value = match (&self.from, self.how) {
            (Placement::Shard { dim, .. }, Redistribution::AllGather | Redistribution::AllToAll) => {
                self.join(part, *dim, member)?
            }
            (Placement::Partial { op }, Redistribution::AllReduce | Redistribution::ReduceScatter) => {
                let reduced = B::all_reduce(vec![part], reduce_op(*op), &member.communicator)?;
                self.own(reduced.into_iter().next().expect("one in, one out"), member.rank)
            }
            (Placement::Replicate, Redistribution::Slice) => self.own(part, member.rank),
            (from, how) => panic!("{how:?} from {from} to {}: no such move", self.to),
        };
        self.target.set(member, B::move_to(value, &member.device));
        Ok(())
    }
}

impl<B: Member> RedistributeTask<B> {
    /// This member's part of a value that it holds whole.
    fn own(&self, whole: Value<B>, rank: usize) -> Value<B> {
        match &self.to {
            Placement::Shard { dim, lengths } => whole.narrow(*dim, lengths.range(rank)),
            _ => whole,
        }
    }

    /// Hands each member what its new part needs of this one's, and joins what this member was handed. Each cuts its own
    /// part, on its own thread.
    fn join(&self, part: Value<B>, dim: usize, member: &MemberContext<B>) -> Result<Value<B>, CollectiveError> {
        let num_members = self.target.num_members();
        let pieces: Vec<_> = (0..num_members).map(|to| self.piece(&part, dim, member.rank, to)).collect();
        let all = member.communicator.exchange(self.operation(), num_bytes(&part), Arc::new(pieces))?;
        let own = all.iter().filter_map(|pieces| pieces[member.rank].clone());
        let own: Vec<Value<B>> = own.map(|piece| B::move_to(piece, &member.device)).collect();
        if own.is_empty() {
            let mut empty = part.shape();
            empty[dim] = 0;
            if let Placement::Shard { dim: to_dim, lengths } = &self.to {
                empty[*to_dim] = lengths.of(member.rank);
            }
            return Ok(part.same_kind_full(empty, Scalar::new(0, &part.dtype()), &member.device));
        }
        Ok(Value::cat(own, dim))
    }

    /// What member `to` needs of `part`, which member `from` holds; `None` if it holds nothing that `to` needs.
    fn piece(&self, part: &Value<B>, dim: usize, from: usize, to: usize) -> Option<Value<B>> {
        let Placement::Shard { lengths: cut, .. } = &self.from else { panic!("only a sharded tensor is joined") };
        let have = cut.range(from);
        match &self.to {
            _ if have.is_empty() => None,
            Placement::Shard { dim: to_dim, lengths } if *to_dim != dim => {
                Some(part.clone().narrow(*to_dim, lengths.range(to)))
            }
            Placement::Shard { lengths, .. } => {
                let want = lengths.range(to);
                let (start, end) = (have.start.max(want.start), have.end.min(want.end));
                (start < end).then(|| part.clone().narrow(dim, start - have.start..end - have.start))
            }
            _ => Some(part.clone()),
        }
    }
}

/// The collectives' name of a partial placement's operation.
fn reduce_op(op: PartialOp) -> ReduceOp {
    match op {
        PartialOp::Sum => ReduceOp::Sum,
        PartialOp::Max => ReduceOp::Max,
        PartialOp::Min => ReduceOp::Min,
    }
}

//! The tensor of a replica: one shape and dtype, and a placement that says where its parts are.

use std::{
    borrow::Borrow,
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread::{self, ThreadId},
};

use bonfire_placement::{PartialOp, Placement};
use burn_backend::{DType, Distribution, QTensorPrimitive, Scalar, Shape, TensorMetadata, quantization::QuantScheme};

use crate::{
    Member, RandomMode, ReplicaDevice,
    group::MemberContext,
    memory::{Buffer, HomeValue, Memory, MemoryKind},
    operands::Distance,
    random::{Draw, Law},
    value::{Full, Kind, Quantized, Value},
};

/// A tensor of a [`Replica<B>`](crate::Replica), of kind `K`.
pub struct ReplicaTensor<B: Member, K: Kind<B>> {
    device: ReplicaDevice<B>,
    state: State<B, K>,
}

/// Small results at home are kept as they are: no allocation beside the inner backend's own. What is spread, may be
/// spread by several operations in turn, or has no storage of its own is shared by its handles.
enum State<B: Member, K: Kind<B>> {
    Home(K::Inline),
    Shared { shape: Shape, storage: Arc<Storage<B>> },
}

/// Results at home of more elements than this are shared by their handles, so that bringing one to the members twice
/// costs one move. Below, the bookkeeping would cost more.
const SHARED_FROM: usize = 1024;

impl<B: Member, K: Kind<B>> ReplicaTensor<B, K> {
    pub(crate) fn new(tensor: Tensor<B>) -> Self {
        let Tensor { shape, device, storage } = tensor;
        Self { device, state: State::Shared { shape, storage } }
    }

    /// A result of an operation at home on inputs that were no further away than `inputs`. That of a few small inputs is
    /// taken to be small; where it is not (an outer product, a repeated tensor), it may be brought to the members twice.
    #[inline(always)]
    pub(crate) fn at_home(primitive: K::Primitive, device: ReplicaDevice<B>, inputs: Distance) -> Self {
        if inputs > Distance::Inline && device.group.spreads() && primitive.shape().num_elements() > SHARED_FROM {
            return Self::new(Tensor::at_home(K::erase(primitive), device));
        }
        Self { device, state: State::Home(primitive.into()) }
    }

    /// A tensor on the home device; spread at once if the device is set to do so.
    pub(crate) fn fresh(primitive: K::Primitive, device: &ReplicaDevice<B>) -> Self {
        if !device.group.spreads() {
            return Self { device: device.clone(), state: State::Home(primitive.into()) };
        }
        Self::new(Tensor::at_home(K::erase(primitive), device.clone()).spread_if_eager())
    }

    /// A drawn tensor: by `stream`, as the inner backend draws, or from counters, where and when it is needed.
    pub(crate) fn drawn(
        shape: Shape,
        distribution: Distribution,
        dtype: DType,
        device: &ReplicaDevice<B>,
        stream: impl FnOnce(Shape, &B::Device) -> K::Primitive,
    ) -> Self {
        let group = &device.group;
        match group.options.random {
            RandomMode::Stream => Self::fresh(stream(shape, group.home()), device),
            RandomMode::Counter => {
                let law = Law::new(distribution, dtype);
                let storage = Storage::drawn(group.random().draw(law), shape.clone());
                Self::new(Tensor::new(shape, device.clone(), storage).spread_if_eager())
            }
        }
    }

    /// A tensor of one value everywhere, which is never stored: whoever needs it makes it.
    pub(crate) fn fill(shape: Shape, value: Scalar, dtype: DType, device: &ReplicaDevice<B>) -> Self {
        Self::new(Tensor::new(shape, device.clone(), Storage::fill(Fill { value, full: K::full }, dtype)))
    }

    /// The device of the tensor.
    pub fn device(&self) -> ReplicaDevice<B> {
        self.device.clone()
    }

    pub(crate) fn device_ref(&self) -> &ReplicaDevice<B> {
        &self.device
    }

    /// Where the tensor's parts sit. Fixed when the tensor is made.
    pub fn placement(&self) -> &Placement {
        static LOCAL: Placement = Placement::Local;
        match &self.state {
            State::Home(_) => &LOCAL,
            State::Shared { storage, .. } => &storage.placement,
        }
    }

    /// Whether every element is zero without anyone looking.
    pub(crate) fn is_zero_fill(&self) -> bool {
        matches!(&self.state, State::Shared { storage, .. } if storage.is_zero_fill())
    }

    #[inline(always)]
    pub(crate) fn distance(&self) -> Distance {
        let State::Shared { shape, storage } = &self.state else { return Distance::Inline };
        let is_home = match storage.placement {
            Placement::Local => storage.shape == *shape,
            Placement::Fill => shape.num_elements() <= SHARED_FROM,
            Placement::Replicate | Placement::Shard { .. } | Placement::Partial { .. } => false,
        };
        if is_home { Distance::Shared } else { Distance::Away }
    }

    /// The device, and the whole value there; moved out if this is the last handle.
    ///
    /// # Panics
    ///
    /// If the tensor is spread.
    #[inline(always)]
    pub(crate) fn into_home(self) -> (ReplicaDevice<B>, K::Primitive) {
        let Self { device, state } = self;
        let primitive = match state {
            State::Home(inline) => K::take(inline),
            State::Shared { shape, storage } => {
                K::restore(Tensor { shape, device: device.clone(), storage }.into_home())
            }
        };
        (device, primitive)
    }

    /// The same without its kind.
    pub(crate) fn erase(self) -> Tensor<B> {
        match self.state {
            State::Home(inline) => Tensor::at_home(K::erase(K::take(inline)), self.device),
            State::Shared { shape, storage } => Tensor { shape, device: self.device, storage },
        }
    }
}

impl<B: Member, K: Kind<B>> Clone for ReplicaTensor<B, K> {
    fn clone(&self) -> Self {
        let state = match &self.state {
            State::Home(inline) => State::Home(inline.clone()),
            State::Shared { shape, storage } => {
                storage.note_clone();
                State::Shared { shape: shape.clone(), storage: storage.clone() }
            }
        };
        Self { device: self.device.clone(), state }
    }
}

impl<B: Member, K: Kind<B>> fmt::Debug for ReplicaTensor<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shape, dtype) = (self.shape(), self.dtype());
        write!(f, "ReplicaTensor({shape} {dtype:?} {} on {:?})", self.placement(), self.device)
    }
}

impl<B: Member, K: Kind<B>> TensorMetadata for ReplicaTensor<B, K> {
    fn dtype(&self) -> DType {
        match &self.state {
            State::Home(inline) => inline.borrow().dtype(),
            State::Shared { storage, .. } => storage.dtype,
        }
    }

    fn shape(&self) -> Shape {
        match &self.state {
            State::Home(inline) => inline.borrow().shape(),
            State::Shared { shape, .. } => shape.clone(),
        }
    }

    fn rank(&self) -> usize {
        match &self.state {
            State::Home(inline) => inline.borrow().rank(),
            State::Shared { shape, .. } => shape.num_dims(),
        }
    }
}

impl<B: Member> QTensorPrimitive for ReplicaTensor<B, Quantized> {
    fn scheme(&self) -> &QuantScheme {
        match &self.state {
            State::Home(inline) => inline.scheme(),
            State::Shared { storage, .. } => match &storage.dtype {
                DType::QFloat(scheme) => scheme,
                other => panic!("a quantized tensor has a quantized dtype, not {other:?}"),
            },
        }
    }

    fn default_scheme() -> QuantScheme {
        B::QuantizedTensorPrimitive::default_scheme()
    }
}

/// [`ReplicaTensor`] without its kind.
///
/// It may be of a larger shape than what is stored: then the stored dims of length 1 repeat, and so do dims that the
/// storage lacks on the left, as in broadcasting. Such a tensor is *expanded*.
pub(crate) struct Tensor<B: Member> {
    /// Global shape.
    pub(crate) shape: Shape,
    pub(crate) device: ReplicaDevice<B>,
    pub(crate) storage: Arc<Storage<B>>,
}

impl<B: Member> Tensor<B> {
    pub(crate) fn new(shape: Shape, device: ReplicaDevice<B>, storage: Storage<B>) -> Self {
        Self { shape, device, storage: Arc::new(storage) }
    }

    /// A tensor that is not spread yet.
    pub(crate) fn at_home(value: Value<B>, device: ReplicaDevice<B>) -> Self {
        let shape = value.shape();
        Self::new(shape.clone(), device, Storage::home(value, shape))
    }

    pub(crate) fn is_expanded(&self) -> bool {
        self.storage.fill.is_none() && self.storage.shape != self.shape
    }

    /// Whether less is stored than the tensor holds: it is expanded, or a fill.
    pub(crate) fn is_stored_small(&self) -> bool {
        self.storage.fill.is_some() || self.is_expanded()
    }

    pub(crate) fn is_sharded(&self) -> bool {
        matches!(self.storage.placement, Placement::Shard { .. })
    }

    /// The shape of what is stored, in as many dims as the tensor has; of one element, if nothing needs to be.
    pub(crate) fn stored_shape(&self) -> Shape {
        let rank = self.shape.num_dims();
        let stored: &[usize] = if self.storage.fill.is_some() { &[] } else { &self.storage.shape };
        std::iter::repeat_n(1, rank - stored.len()).chain(stored.iter().copied()).collect()
    }

    /// Where the stored parts must be for the tensor's own to be in `placement`.
    pub(crate) fn stored_placement(&self, placement: &Placement) -> Placement {
        match placement {
            Placement::Shard { dim, lengths } if self.is_expanded() => {
                let num_missing = self.shape.num_dims() - self.storage.shape.num_dims();
                match dim.checked_sub(num_missing) {
                    Some(stored) if self.storage.shape[stored] > 1 => Placement::shard(stored, lengths.clone()),
                    Some(_) | None => Placement::Replicate,
                }
            }
            placement => placement.clone(),
        }
    }

    /// The whole value on the home device; moved out if this is the last handle.
    ///
    /// # Panics
    ///
    /// If the tensor is spread.
    #[inline(never)]
    pub(crate) fn into_home(self) -> Value<B> {
        let is_expanded = self.is_expanded();
        let Tensor { shape, device, storage } = self;
        if let Some(fill) = &storage.fill {
            return (fill.full)(shape, fill.value, device.group.home(), storage.dtype);
        }
        let home_device = device.group.home();
        let value = match Arc::try_unwrap(storage) {
            Ok(Storage { home, shape, .. }) => home.map(|home| home.into_value(&shape, home_device)),
            Err(storage) => storage.home.as_ref().map(|home| home.value(&storage.shape, home_device).clone()),
        }
        .expect("a tensor that is not spread has a value at home");
        if is_expanded { B::move_to(value.expanded(shape), home_device) } else { value }
    }
}

impl<B: Member> Clone for Tensor<B> {
    fn clone(&self) -> Self {
        self.storage.note_clone();
        Self { shape: self.shape.clone(), device: self.device.clone(), storage: self.storage.clone() }
    }
}

/// Where a tensor's values are. The placement never changes; other forms of the same values are kept beside it once
/// somebody needed them.
pub(crate) struct Storage<B: Member> {
    /// Of the values, over all members.
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) placement: Placement,
    fill: Option<Fill<B>>,
    /// Counts `home` once the tensor has other forms too; dropped before it, as long as its address is its own.
    home_value: OnceLock<HomeValue>,
    /// Of `Local` tensors.
    home: Option<Home<B>>,
    /// The parts in each placement the tensor was needed in. Changed only by who holds the group's order.
    forms: Mutex<Vec<(Placement, Arc<Parts<B>>)>>,
    /// Of a sum in parts.
    sum: Option<Sum>,
}

/// The whole value on the home device.
enum Home<B: Member> {
    Value(Value<B>),
    /// Made once somebody reads it there; members make their parts themselves.
    Drawn {
        draw: Draw,
        whole: OnceLock<Value<B>>,
    },
}

impl<B: Member> Home<B> {
    fn value(&self, shape: &Shape, device: &B::Device) -> &Value<B> {
        match self {
            Home::Value(value) => value,
            Home::Drawn { draw, whole } => match whole.get() {
                Some(value) => value,
                // Not made within: the threads that help may come by here for another reader meanwhile.
                None => {
                    let value = draw.whole(shape, device);
                    whole.get_or_init(|| value)
                }
            },
        }
    }

    fn into_value(self, shape: &Shape, device: &B::Device) -> Value<B> {
        match self {
            Home::Value(value) => value,
            Home::Drawn { draw, whole } => whole.into_inner().unwrap_or_else(|| draw.whole(shape, device)),
        }
    }
}

/// What the members' parts of a tensor that is not spread are made from.
pub(crate) enum Origin<'a, B: Member> {
    Value(&'a Value<B>),
    Draw(&'a Draw),
}

/// A sum whose parts the members hold and that nobody has formed yet, or somebody has.
#[derive(Debug)]
pub(crate) struct Sum {
    creator: ThreadId,
    /// Later sums have larger numbers.
    number: u64,
    /// Whether the program asked for it by name, as a mean or a sum, so that it may be wanted at once.
    statistic: bool,
    /// Set once the tensor was cloned, in the order of the creator's program: somebody else may form the same sum.
    shared: AtomicBool,
    /// Set when the creator had it formed: the parts are gone, the replicated form has the value.
    settled: AtomicBool,
}

impl Sum {
    /// A sum made by the calling thread.
    pub(crate) fn new(number: u64, statistic: bool) -> Self {
        let creator = thread::current().id();
        Self { creator, number, statistic, shared: AtomicBool::new(false), settled: AtomicBool::new(false) }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn is_statistic(&self) -> bool {
        self.statistic
    }

    /// Whether the calling thread made it and has not had it formed.
    fn is_open(&self) -> bool {
        self.creator == thread::current().id() && !self.settled.load(Ordering::Relaxed)
    }
}

/// One value everywhere.
pub(crate) struct Fill<B: Member> {
    pub(crate) value: Scalar,
    pub(crate) full: Full<B>,
}

impl<B: Member> Clone for Fill<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Member> Copy for Fill<B> {}

impl<B: Member> Storage<B> {
    fn home(value: Value<B>, shape: Shape) -> Self {
        let dtype = value.dtype();
        Self { home: Some(Home::Value(value)), ..Self::empty(Placement::Local, shape, dtype) }
    }

    fn drawn(draw: Draw, shape: Shape) -> Self {
        let dtype = draw.dtype();
        let home = Home::Drawn { draw, whole: OnceLock::new() };
        Self { home: Some(home), ..Self::empty(Placement::Local, shape, dtype) }
    }

    fn fill(fill: Fill<B>, dtype: DType) -> Self {
        Self { fill: Some(fill), ..Self::empty(Placement::Fill, Shape::from([1]), dtype) }
    }

    pub(crate) fn spread(placement: Placement, shape: Shape, dtype: DType, parts: Arc<Parts<B>>) -> Self {
        Self { forms: Mutex::new(vec![(placement.clone(), parts)]), ..Self::empty(placement, shape, dtype) }
    }

    /// As [`spread`](Self::spread), for a sum in parts.
    pub(crate) fn partial(shape: Shape, dtype: DType, parts: Arc<Parts<B>>, sum: Sum) -> Self {
        Self { sum: Some(sum), ..Self::spread(Placement::Partial { op: PartialOp::Sum }, shape, dtype, parts) }
    }

    fn empty(placement: Placement, shape: Shape, dtype: DType) -> Self {
        let (forms, home_value) = (Mutex::new(Vec::new()), OnceLock::new());
        Self { shape, dtype, placement, fill: None, home: None, home_value, forms, sum: None }
    }

    /// A second handle may form the same sum.
    fn note_clone(&self) {
        if let Some(sum) = &self.sum {
            sum.shared.store(true, Ordering::Relaxed);
        }
    }

    /// The placement that rules see. A sum in parts is one only to its creator, until the creator has it formed: then
    /// what other threads do with it, and when, never changes which sums are formed.
    pub(crate) fn planned(&self) -> &Placement {
        match &self.placement {
            Placement::Partial { op: PartialOp::Sum } if !self.is_open() => &Placement::Replicate,
            placement => placement,
        }
    }

    pub(crate) fn as_sum(&self) -> Option<&Sum> {
        self.sum.as_ref()
    }

    /// Whether this is a sum in parts that the calling thread made and has not had formed.
    pub(crate) fn is_open(&self) -> bool {
        self.sum.as_ref().is_some_and(Sum::is_open)
    }

    /// Whether nobody but the one handle at hand can ever form this sum.
    pub(crate) fn is_open_to_one(&self) -> bool {
        self.sum.as_ref().is_some_and(|sum| sum.is_open() && !sum.shared.load(Ordering::Relaxed))
    }

    /// The parts of a sum, to form it; to be used up if the calling thread made them, since no rule asks for them again.
    ///
    /// # Panics
    ///
    /// If the parts are gone, which they are only once the sum was formed.
    pub(crate) fn parts_to_sum(&self) -> (Arc<Parts<B>>, Reading) {
        let parts = self.form(&self.placement).expect("a sum has its parts until its creator has it formed");
        (parts, if self.is_open() { Reading::Take } else { Reading::Share })
    }

    /// Marks a sum as formed, if the calling thread made it; the parts go with the tasks that still read them.
    pub(crate) fn settle(&self) {
        if let Some(sum) = self.sum.as_ref().filter(|sum| sum.is_open()) {
            sum.settled.store(true, Ordering::Relaxed);
            let mut forms = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
            forms.retain(|(placement, _)| *placement != self.placement);
        }
    }

    /// Whether every element is zero without anyone looking.
    pub(crate) fn is_zero_fill(&self) -> bool {
        self.fill.as_ref().is_some_and(|fill| match fill.value {
            Scalar::Float(value) => value == 0.0,
            Scalar::Int(value) => value == 0,
            Scalar::UInt(value) => value == 0,
            Scalar::Bool(_) => false,
        })
    }

    pub(crate) fn as_fill(&self) -> Option<Fill<B>> {
        self.fill
    }

    /// What is at home; a draw that nobody has read there is still to be made.
    pub(crate) fn origin(&self) -> Option<Origin<'_, B>> {
        Some(match self.home.as_ref()? {
            Home::Value(value) => Origin::Value(value),
            Home::Drawn { draw, whole } => whole.get().map_or(Origin::Draw(draw), Origin::Value),
        })
    }

    pub(crate) fn form(&self, placement: &Placement) -> Option<Arc<Parts<B>>> {
        let forms = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        forms.iter().find(|(known, _)| known == placement).map(|(_, parts)| parts.clone())
    }

    /// What the values are used for.
    pub(crate) fn memory_kind(&self) -> MemoryKind {
        match self.placement {
            Placement::Fill => MemoryKind::Other,
            Placement::Shard { .. } => MemoryKind::Activations,
            Placement::Local | Placement::Replicate | Placement::Partial { .. } => {
                let form = self.form(&Placement::Replicate).or_else(|| self.form(&self.placement));
                form.map_or(MemoryKind::Other, |parts| parts.kind())
            }
        }
    }

    /// What another form of the values is used for.
    pub(crate) fn form_kind(&self, placement: &Placement) -> MemoryKind {
        match (placement, &self.placement) {
            (Placement::Shard { .. }, _) => MemoryKind::Activations,
            (_, Placement::Local) => MemoryKind::Other,
            _ => self.memory_kind(),
        }
    }

    /// Counts the value at home, which stays there beside the forms that the members have.
    pub(crate) fn count_home(&self, memory: &Arc<Memory>) {
        if let Some(Origin::Value(value)) = self.origin() {
            self.home_value.get_or_init(|| memory.hold_home(B::buffer(value)));
        }
    }

    pub(crate) fn keep_form(&self, placement: Placement, parts: Arc<Parts<B>>) {
        /// Where shares change, a tensor that lives on is asked for in other lengths each time.
        const MAX_SHARDED: usize = 4;
        let mut forms = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        forms.push((placement, parts));
        let can_go = |(placement, _): &(Placement, _)| {
            matches!(placement, Placement::Shard { .. }) && *placement != self.placement
        };
        if forms.iter().filter(|form| can_go(form)).count() > MAX_SHARDED {
            let oldest = forms.iter().position(can_go).expect("there are several");
            forms.remove(oldest);
        }
    }
}

/// One value per member, each put in and taken out by that member's own tasks.
pub(crate) struct Parts<B: Member> {
    slots: Box<[Mutex<Option<Held<B>>>]>,
    /// A [`MemoryKind`].
    kind: AtomicU8,
    memory: Arc<Memory>,
}

/// A value, and as what it was counted.
struct Held<B: Member> {
    value: Value<B>,
    buffer: Buffer,
    kind: MemoryKind,
}

impl<B: Member> Parts<B> {
    pub(crate) fn num_members(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn new(memory: &Arc<Memory>, kind: MemoryKind) -> Arc<Self> {
        let slots = (0..memory.num_members()).map(|_| Mutex::new(None)).collect();
        Arc::new(Self { slots, kind: AtomicU8::new(kind as u8), memory: memory.clone() })
    }

    pub(crate) fn kind(&self) -> MemoryKind {
        MemoryKind::of_index(self.kind.load(Ordering::Relaxed))
    }

    /// Counts the values as `kind`, those that are there and those to come.
    pub(crate) fn set_kind(&self, kind: MemoryKind) {
        // A member that puts its value in now reads the kind within the slot's lock: it finds the new one, or is found.
        self.kind.store(kind as u8, Ordering::Relaxed);
        for (rank, slot) in self.slots.iter().enumerate() {
            if let Some(held) = &mut *slot.lock().unwrap_or_else(PoisonError::into_inner) {
                self.memory.relabel(rank, held.buffer, std::mem::replace(&mut held.kind, kind), kind);
            }
        }
    }

    pub(crate) fn set(&self, member: &MemberContext<B>, value: Value<B>) {
        let buffer = B::buffer(&value);
        let mut slot = self.slots[member.rank].lock().unwrap_or_else(PoisonError::into_inner);
        let kind = self.kind();
        self.memory.hold(member.rank, buffer, kind);
        *slot = Some(Held { value, buffer, kind });
    }

    pub(crate) fn read(&self, member: &MemberContext<B>, reading: Reading) -> Value<B> {
        let mut slot = self.slots[member.rank].lock().unwrap_or_else(PoisonError::into_inner);
        let value = match reading {
            Reading::Share => slot.as_ref().map(|held| held.value.clone()),
            Reading::Take => slot.take().map(|Held { value, buffer, kind }| {
                member.account.take(buffer, kind);
                value
            }),
        };
        value
            .expect("an earlier task of this member put the value in, and no task reads it after the one that takes it")
    }
}

impl<B: Member> Drop for Parts<B> {
    fn drop(&mut self) {
        for (rank, slot) in self.slots.iter_mut().enumerate() {
            if let Some(held) = slot.get_mut().unwrap_or_else(PoisonError::into_inner) {
                // Before the value goes: then its address may belong to another one.
                self.memory.release(rank, held.buffer, held.kind);
            }
        }
    }
}

/// Whether a task leaves a value for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Other tasks may read it too.
    Share,
    /// The tensor's last handle went into this task: the buffer may be changed in place.
    Take,
}

//! The tensor of a replica: one shape and dtype, and a placement that says where its parts are.

use std::{
    fmt,
    marker::PhantomData,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ThreadId},
};

use bonfire_placement::{PartialOp, Placement};
use burn_backend::{DType, QTensorPrimitive, Scalar, Shape, TensorMetadata, quantization::QuantScheme};

use crate::{
    Member, ReplicaDevice,
    value::{Full, Kind, Quantized, Value},
};

/// A tensor of a [`Replica<B>`](crate::Replica), of kind `K`.
pub struct ReplicaTensor<B: Member, K> {
    pub(crate) tensor: Tensor<B>,
    kind: PhantomData<fn() -> K>,
}

impl<B: Member, K: Kind<B>> ReplicaTensor<B, K> {
    pub(crate) fn new(tensor: Tensor<B>) -> Self {
        Self { tensor, kind: PhantomData }
    }

    /// A tensor on the home device; spread at once if the device is set to do so.
    pub(crate) fn fresh(primitive: K::Primitive, device: &ReplicaDevice<B>) -> Self {
        Self::new(Tensor::at_home(K::erase(primitive), device).spread_if_eager())
    }

    /// A tensor of one value everywhere, which needs no storage until someone reads it.
    pub(crate) fn fill(shape: Shape, value: Scalar, dtype: DType, device: &ReplicaDevice<B>) -> Self {
        let fill = Fill { value, full: K::full };
        Self::new(Tensor::new(shape, dtype, device.clone(), Storage::fill(fill)))
    }

    /// The device of the tensor.
    pub fn device(&self) -> ReplicaDevice<B> {
        self.tensor.device.clone()
    }

    /// Where the tensor's parts sit. Fixed when the tensor is made.
    pub fn placement(&self) -> &Placement {
        &self.tensor.storage.placement
    }
}

impl<B: Member, K> Clone for ReplicaTensor<B, K> {
    fn clone(&self) -> Self {
        Self { tensor: self.tensor.clone(), kind: PhantomData }
    }
}

impl<B: Member, K> fmt::Debug for ReplicaTensor<B, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tensor { shape, dtype, device, storage } = &self.tensor;
        write!(f, "ReplicaTensor({shape} {dtype:?} {} on {device:?})", storage.placement)
    }
}

impl<B: Member, K: Kind<B>> TensorMetadata for ReplicaTensor<B, K> {
    fn dtype(&self) -> DType {
        self.tensor.dtype
    }

    fn shape(&self) -> Shape {
        self.tensor.shape.clone()
    }

    fn rank(&self) -> usize {
        self.tensor.shape.num_dims()
    }
}

impl<B: Member> QTensorPrimitive for ReplicaTensor<B, Quantized> {
    fn scheme(&self) -> &QuantScheme {
        match &self.tensor.dtype {
            DType::QFloat(scheme) => scheme,
            other => panic!("a quantized tensor has a quantized dtype, not {other:?}"),
        }
    }

    fn default_scheme() -> QuantScheme {
        B::QuantizedTensorPrimitive::default_scheme()
    }
}

/// [`ReplicaTensor`] without its kind.
pub(crate) struct Tensor<B: Member> {
    /// Global shape.
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) device: ReplicaDevice<B>,
    pub(crate) storage: Arc<Storage<B>>,
}

impl<B: Member> Tensor<B> {
    pub(crate) fn new(shape: Shape, dtype: DType, device: ReplicaDevice<B>, storage: Storage<B>) -> Self {
        Self { shape, dtype, device, storage: Arc::new(storage) }
    }

    /// A tensor that is not spread yet.
    pub(crate) fn at_home(value: Value<B>, device: &ReplicaDevice<B>) -> Self {
        Self::new(value.shape(), value.dtype(), device.clone(), Storage::home(value))
    }

    /// The whole value on the home device; moved out if this is the last handle.
    ///
    /// # Panics
    ///
    /// If the tensor is spread.
    pub(crate) fn into_home(self) -> Value<B> {
        let Tensor { shape, dtype, device, storage } = self;
        storage.ensure_home(&shape, dtype, &device);
        match Arc::try_unwrap(storage) {
            Ok(storage) => storage.home.into_inner(),
            Err(storage) => storage.home.get().cloned(),
        }
        .expect("a tensor that is not spread has a value at home")
    }
}

impl<B: Member> Clone for Tensor<B> {
    fn clone(&self) -> Self {
        if let Some(sum) = &self.storage.sum {
            sum.shared.store(true, Ordering::Relaxed);
        }
        Self {
            shape: self.shape.clone(),
            dtype: self.dtype,
            device: self.device.clone(),
            storage: self.storage.clone(),
        }
    }
}

/// Where a tensor's values are. The placement never changes; other forms of the same values are kept beside it once
/// somebody needed them.
pub(crate) struct Storage<B: Member> {
    pub(crate) placement: Placement,
    fill: Option<Fill<B>>,
    /// `Local` tensors: the value. `Fill`: the value once it was read as a whole.
    home: OnceLock<Value<B>>,
    /// The parts in each placement the tensor was needed in. Changed only by who holds the group's order.
    forms: Mutex<Vec<(Placement, Arc<Parts<B>>)>>,
    /// Of a sum in parts.
    sum: Option<Sum>,
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
    pub(crate) fn home(value: Value<B>) -> Self {
        Self { home: OnceLock::from(value), ..Self::empty(Placement::Local, None) }
    }

    fn fill(fill: Fill<B>) -> Self {
        Self::empty(Placement::Fill, Some(fill))
    }

    pub(crate) fn spread(placement: Placement, parts: Arc<Parts<B>>) -> Self {
        Self { forms: Mutex::new(vec![(placement.clone(), parts)]), ..Self::empty(placement, None) }
    }

    /// As [`spread`](Self::spread), for a sum in parts.
    pub(crate) fn partial(parts: Arc<Parts<B>>, sum: Sum) -> Self {
        Self { sum: Some(sum), ..Self::spread(Placement::Partial { op: PartialOp::Sum }, parts) }
    }

    fn empty(placement: Placement, fill: Option<Fill<B>>) -> Self {
        Self { placement, fill, home: OnceLock::new(), forms: Mutex::new(Vec::new()), sum: None }
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

    pub(crate) fn at_home(&self) -> Option<&Value<B>> {
        self.home.get()
    }

    fn ensure_home(&self, shape: &Shape, dtype: DType, device: &ReplicaDevice<B>) {
        if let Some(fill) = &self.fill {
            self.home.get_or_init(|| (fill.full)(shape.clone(), fill.value, device.group.home(), dtype));
        }
    }

    pub(crate) fn form(&self, placement: &Placement) -> Option<Arc<Parts<B>>> {
        let forms = self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        forms.iter().find(|(known, _)| known == placement).map(|(_, parts)| parts.clone())
    }

    pub(crate) fn keep_form(&self, placement: Placement, parts: Arc<Parts<B>>) {
        self.forms.lock().unwrap_or_else(PoisonError::into_inner).push((placement, parts));
    }
}

/// One value per member, each put in and taken out by that member's own tasks.
pub(crate) struct Parts<B: Member> {
    slots: Box<[Mutex<Option<Value<B>>>]>,
}

impl<B: Member> Parts<B> {
    pub(crate) fn num_members(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn new(num_members: usize) -> Arc<Self> {
        Arc::new(Self { slots: (0..num_members).map(|_| Mutex::new(None)).collect() })
    }

    pub(crate) fn set(&self, rank: usize, value: Value<B>) {
        *self.slots[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
    }

    pub(crate) fn read(&self, rank: usize, reading: Reading) -> Value<B> {
        let mut slot = self.slots[rank].lock().unwrap_or_else(PoisonError::into_inner);
        match reading {
            Reading::Share => slot.clone(),
            Reading::Take => slot.take(),
        }
        .expect("an earlier task of this member put the value in, and no task reads it after the one that takes it")
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

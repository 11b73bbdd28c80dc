//! One operation: decide where it runs, then run it, at home or on every member.

use std::sync::Arc;

use bonfire_collectives::CollectiveError;
use bonfire_placement::{Op, Operand, Placement, Plan};
use burn_backend::{DType, MetadataError, Scalar, Shape};
use crossbeam_channel::{Sender, bounded};

use crate::{
    Member, ReplicaDevice, Spread,
    group::{MemberContext, Order, Task},
    redistribute::Source,
    tensor::{Parts, ReplicaTensor, Storage, Tensor},
    value::{Full, Kind, Value, identity},
};

/// An operation, before its inputs are known.
pub(crate) struct Call {
    /// Named in errors.
    pub(crate) name: &'static str,
    pub(crate) op: Op,
    /// Multiply-adds, for the operations that may spread tensors that are still at home; 0 for all others.
    pub(crate) work: usize,
    /// The rule speaks of the first `num_planned` inputs; those after them (indices, say) are needed whole.
    pub(crate) num_planned: usize,
}

impl Call {
    pub(crate) fn new(name: &'static str, op: Op) -> Self {
        Self { name, op, work: 0, num_planned: usize::MAX }
    }

    pub(crate) fn heavy(self, work: usize) -> Self {
        Self { work, ..self }
    }

    pub(crate) fn planned(self, num_planned: usize) -> Self {
        Self { num_planned, ..self }
    }
}

/// What an output will be, as far as it is known without running the operation.
#[derive(Clone)]
pub(crate) struct Spec {
    /// Global shape; `None` where only the inner backend knows.
    shape: Option<Result<Shape, MetadataError>>,
    /// `None` where the inner backend chooses.
    dtype: Option<DType>,
}

impl Spec {
    pub(crate) fn new(shape: impl Into<Shape>, dtype: impl Into<DType>) -> Self {
        Self { shape: Some(Ok(shape.into())), dtype: Some(dtype.into()) }
    }

    /// A shape that was inferred and may not exist: then the operation panics on the caller's thread.
    pub(crate) fn inferred(shape: Result<Shape, MetadataError>, dtype: impl Into<DType>) -> Self {
        Self { shape: Some(shape), dtype: Some(dtype.into()) }
    }

    /// A known shape of a dtype that the inner backend chooses.
    pub(crate) fn any_dtype(shape: Result<Shape, MetadataError>) -> Self {
        Self { shape: Some(shape), dtype: None }
    }

    pub(crate) fn unknown() -> Self {
        Self { shape: None, dtype: None }
    }
}

/// A [`Spec`] with nothing left open.
#[derive(Clone)]
struct Known {
    shape: Shape,
    dtype: DType,
}

/// Where a body runs: at home on whole tensors, or on a member on its parts.
pub(crate) struct Part<'a> {
    rank: usize,
    /// One per output; empty at home.
    placements: &'a [Placement],
    outputs: &'a [Known],
}

impl Part<'_> {
    /// The shape that this member's part of output `index` must have.
    pub(crate) fn shape(&self, index: usize, whole: &Shape) -> Shape {
        match self.placements.get(index) {
            Some(placement) => Shape::from(placement.local_shape(&self.outputs[index].shape, self.rank)),
            None => whole.clone(),
        }
    }

    /// Whether output `index` is the sum of what the members return.
    pub(crate) fn is_partial(&self, index: usize) -> bool {
        matches!(self.placements.get(index), Some(Placement::Partial { .. }))
    }
}

/// Runs `body` where the inputs are: on the calling thread while all of them are at home, else on every member.
///
/// # Panics
///
/// If the inputs are on different devices, if their shapes do not fit, if the group is broken, or as `body` does.
pub(crate) fn apply<B, I, O>(
    call: Call,
    inputs: I,
    specs: O::Specs,
    body: impl Fn(I::Primitives, &Part) -> O::Primitives + Send + Sync + 'static,
) -> O
where
    B: Member,
    I: Inputs<B>,
    O: Outputs<B>,
{
    let inputs = inputs.erase();
    let device = common_device(call.name, &inputs);
    let at_home = inputs.iter().flatten().all(|input| !input.storage.placement.is_spread());
    if at_home && !worth_spreading(&call, &device) {
        return run_at_home::<B, I, O>(inputs, device, body);
    }
    let specs = O::specs(specs);
    let known = resolve(&call, &inputs, &specs, &device);
    // An operation whose results are not known yet runs whole, and is waited for.
    let whole = Op::Whole { num_outputs: specs.len() };
    let plan = plan(&call, if known.is_some() { &call.op } else { &whole }, &inputs, &device);
    let splits = |placement: &Placement| !matches!(placement, Placement::Replicate);
    if at_home && !plan.outputs.iter().any(splits) {
        return run_at_home::<B, I, O>(inputs, device, body);
    }

    let learning = known.is_none();
    let first_dtype = inputs.iter().flatten().map(|input| input.dtype).next();
    let known = known.unwrap_or_default();
    let (reply, replies) = if learning { Some(bounded(1)).unzip() } else { (None, None) };
    let parts: Vec<_> = plan.outputs.iter().map(|_| Parts::new(device.num_members())).collect();
    let order = device.group.order();
    let task = OpTask::<B, _> {
        name: call.name,
        idle: idle_members(&plan, device.num_members()),
        sources: sources(&order, inputs, plan.inputs),
        targets: parts.clone(),
        placements: plan.outputs.clone(),
        outputs: known.clone(),
        full: O::full,
        reply,
        body: move |values: Vec<Option<Value<B>>>, part: &Part| O::erase(body(I::restore(values), part)),
    };
    order.enqueue(Arc::new(task));
    drop(order);

    let known = match replies {
        None => known,
        Some(replies) => {
            let learned: Vec<Known> = device.group.wait(&replies, 0).unwrap_or_else(|error| panic!("{error}"));
            for (index, (spec, known)) in specs.iter().zip(&learned).enumerate() {
                if let (None, Some(input)) = (spec.dtype, first_dtype) {
                    device.group.learn_dtype((call.name, index), input, known.dtype);
                }
            }
            learned
        }
    };
    let outputs = known.into_iter().zip(plan.outputs).zip(parts).map(|((known, placement), parts)| {
        Tensor::new(known.shape, known.dtype, device.clone(), Storage::spread(placement, parts))
    });
    O::restore(outputs.collect())
}

impl<B: Member> Tensor<B> {
    /// Shares a fresh tensor out along dim 0 if the device is set to do so at once.
    pub(crate) fn spread_if_eager(self) -> Self {
        let group = &self.device.group;
        let quantized = matches!(self.dtype, DType::QFloat(_));
        if group.options.spread != Spread::Eager || quantized {
            return self;
        }
        let placement = match self.shape.first() {
            Some(&length) if length > 1 => {
                let lengths = group.options.shares.lengths(length, group.num_members());
                Placement::shard(0, lengths.expect("shares were checked when the group was made"))
            }
            _ => Placement::Replicate,
        };
        let Self { shape, dtype, device, .. } = self.clone();
        let order = device.group.order();
        let Source::Parts { parts, .. } = order.source(self, &placement) else { panic!("a fresh tensor is no fill") };
        drop(order);
        Tensor::new(shape, dtype, device, Storage::spread(placement, parts))
    }
}

/// # Panics
///
/// If the inputs are on different devices.
fn common_device<B: Member>(name: &str, inputs: &[Option<Tensor<B>>]) -> ReplicaDevice<B> {
    let mut devices = inputs.iter().flatten().map(|input| &input.device);
    let first = devices.next().expect("an operation has an input");
    for other in devices {
        assert!(
            first == other,
            "{name}: one tensor is on {first:?}, another on {other:?}; move them to one device with to_device first"
        );
    }
    first.clone()
}

fn worth_spreading<B: Member>(call: &Call, device: &ReplicaDevice<B>) -> bool {
    match device.group.options.spread {
        Spread::OnHeavyOp { min_work } => call.work > 0 && call.work >= min_work,
        Spread::Eager => true,
    }
}

fn run_at_home<B: Member, I: Inputs<B>, O: Outputs<B>>(
    inputs: Vec<Option<Tensor<B>>>,
    device: ReplicaDevice<B>,
    body: impl Fn(I::Primitives, &Part) -> O::Primitives,
) -> O {
    device.group.assert_whole();
    let values = inputs.into_iter().map(|input| input.map(Tensor::into_home)).collect();
    let part = Part { rank: 0, placements: &[], outputs: &[] };
    let values = O::erase(body(I::restore(values), &part));
    let outputs =
        values.into_iter().map(|value| Tensor::new(value.shape(), value.dtype(), device.clone(), Storage::home(value)));
    O::restore(outputs.collect())
}

/// The outputs' shapes and dtypes, or `None` if only running the operation tells.
///
/// # Panics
///
/// If a shape was inferred not to exist.
fn resolve<B: Member>(
    call: &Call,
    inputs: &[Option<Tensor<B>>],
    specs: &[Spec],
    device: &ReplicaDevice<B>,
) -> Option<Vec<Known>> {
    let first = inputs.iter().flatten().next().expect("an operation has an input");
    specs
        .iter()
        .enumerate()
        .map(|(index, spec)| {
            let shape = match spec.shape.clone()? {
                Ok(shape) => shape,
                Err(error) => panic!("{}: {error:?} for inputs {}", call.name, Shapes(inputs)),
            };
            let learned = || device.group.learned_dtype((call.name, index), first.dtype);
            Some(Known { shape, dtype: spec.dtype.or_else(learned)? })
        })
        .collect()
}

fn plan<B: Member>(call: &Call, op: &Op, inputs: &[Option<Tensor<B>>], device: &ReplicaDevice<B>) -> Plan {
    let operands: Vec<Operand> = inputs
        .iter()
        .take(call.num_planned)
        .flatten()
        .map(|input| Operand { placement: &input.storage.placement, shape: &input.shape })
        .collect();
    op.plan(&operands, &device.group.options.shares, device.num_members())
        .unwrap_or_else(|error| panic!("{}: {error}, for inputs {}", call.name, Shapes(inputs)))
}

fn sources<B: Member>(
    order: &Order<B>,
    inputs: Vec<Option<Tensor<B>>>,
    placements: Vec<Placement>,
) -> Vec<Option<Source<B>>> {
    let mut placements = placements.into_iter();
    inputs
        .into_iter()
        .map(|input| {
            let input = input?;
            Some(order.source(input, &placements.next().unwrap_or(Placement::Replicate)))
        })
        .collect()
}

/// Per member: whether it holds nothing of what is shared out.
fn idle_members(plan: &Plan, num_members: usize) -> Vec<bool> {
    let lengths: Vec<_> = (plan.inputs.iter().chain(&plan.outputs))
        .filter_map(|placement| match placement {
            Placement::Shard { lengths, .. } => Some(lengths),
            _ => None,
        })
        .collect();
    (0..num_members).map(|rank| lengths.iter().any(|lengths| lengths.of(rank) == 0)).collect()
}

/// One operation, on each member's parts.
struct OpTask<B: Member, F> {
    name: &'static str,
    sources: Vec<Option<Source<B>>>,
    targets: Vec<Arc<Parts<B>>>,
    placements: Vec<Placement>,
    /// Empty while they are being learned.
    outputs: Vec<Known>,
    idle: Vec<bool>,
    full: fn(usize) -> Full<B>,
    /// Told by the first member what came out, if nobody knew before.
    reply: Option<Sender<Vec<Known>>>,
    body: F,
}

impl<B, F> Task<B> for OpTask<B, F>
where
    B: Member,
    F: Fn(Vec<Option<Value<B>>>, &Part) -> Vec<Value<B>> + Send + Sync,
{
    fn operation(&self) -> &'static str {
        self.name
    }

    fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError> {
        let values: Vec<_> =
            self.sources.iter().map(|source| source.as_ref().map(|source| source.fetch(member))).collect();
        let results = if self.idle[member.rank] {
            self.nothing(member)
        } else {
            let part = Part { rank: member.rank, placements: &self.placements, outputs: &self.outputs };
            (self.body)(values, &part)
        };
        if let Some(reply) = self.reply.as_ref().filter(|_| member.rank == 0) {
            let known = results.iter().map(|value| Known { shape: value.shape(), dtype: value.dtype() });
            // The caller may have given up waiting.
            let _ = reply.send(known.collect());
        }
        for (index, (result, target)) in results.into_iter().zip(&self.targets).enumerate() {
            self.check(index, &result, member.rank);
            target.set(member.rank, result);
        }
        Ok(())
    }
}

impl<B: Member, F> OpTask<B, F> {
    /// What a member without a share gives: an empty part, or what changes no sum.
    fn nothing(&self, member: &MemberContext<B>) -> Vec<Value<B>> {
        (self.placements.iter().zip(&self.outputs).enumerate())
            .map(|(index, (placement, output))| {
                let value = match placement {
                    Placement::Partial { op } => identity(*op, output.dtype),
                    _ => Scalar::new(0, &output.dtype),
                };
                let shape = Shape::from(placement.local_shape(&output.shape, member.rank));
                (self.full)(index)(shape, value, &member.device, output.dtype)
            })
            .collect()
    }

    /// # Panics
    ///
    /// If a result is not what was promised to the caller, who already works with the promise.
    fn check(&self, index: usize, result: &Value<B>, rank: usize) {
        let Some(known) = self.outputs.get(index) else { return };
        let shape = Shape::from(self.placements[index].local_shape(&known.shape, rank));
        let (found, dtype) = (result.shape(), result.dtype());
        assert!(
            found == shape && dtype == known.dtype,
            "{} gave {found} {dtype:?} where {shape} {:?} was expected",
            self.name,
            known.dtype
        );
    }
}

/// The inputs of an operation: a tuple of tensors and optional tensors, or a list.
pub(crate) trait Inputs<B: Member> {
    /// The same of the inner backend.
    type Primitives;
    fn erase(self) -> Vec<Option<Tensor<B>>>;
    fn restore(values: Vec<Option<Value<B>>>) -> Self::Primitives;
}

/// One of the [`Inputs`].
pub(crate) trait Input<B: Member> {
    type Primitive;
    fn erase(self) -> Option<Tensor<B>>;
    fn restore(value: Option<Value<B>>) -> Self::Primitive;
}

impl<B: Member, K: Kind<B>> Input<B> for ReplicaTensor<B, K> {
    type Primitive = K::Primitive;

    fn erase(self) -> Option<Tensor<B>> {
        Some(self.tensor)
    }

    fn restore(value: Option<Value<B>>) -> Self::Primitive {
        K::restore(value.expect("a required input"))
    }
}

impl<B: Member, K: Kind<B>> Input<B> for Option<ReplicaTensor<B, K>> {
    type Primitive = Option<K::Primitive>;

    fn erase(self) -> Option<Tensor<B>> {
        self.map(|input| input.tensor)
    }

    fn restore(value: Option<Value<B>>) -> Self::Primitive {
        value.map(K::restore)
    }
}

impl<B: Member, K: Kind<B>> Inputs<B> for Vec<ReplicaTensor<B, K>> {
    type Primitives = Vec<K::Primitive>;

    fn erase(self) -> Vec<Option<Tensor<B>>> {
        self.into_iter().map(Input::erase).collect()
    }

    fn restore(values: Vec<Option<Value<B>>>) -> Self::Primitives {
        values.into_iter().map(<ReplicaTensor<B, K> as Input<B>>::restore).collect()
    }
}

macro_rules! inputs {
    ($($input:ident),+) => {
        impl<B: Member, $($input: Input<B>),+> Inputs<B> for ($($input,)+) {
            type Primitives = ($($input::Primitive,)+);

            fn erase(self) -> Vec<Option<Tensor<B>>> {
                #[allow(non_snake_case)]
                let ($($input,)+) = self;
                vec![$($input.erase()),+]
            }

            fn restore(values: Vec<Option<Value<B>>>) -> Self::Primitives {
                let mut values = values.into_iter();
                ($($input::restore(values.next().flatten()),)+)
            }
        }
    };
}

inputs!(I0);
inputs!(I0, I1);
inputs!(I0, I1, I2);
inputs!(I0, I1, I2, I3);
inputs!(I0, I1, I2, I3, I4);
inputs!(I0, I1, I2, I3, I4, I5);

/// The results of an operation: a tensor, a pair of tensors, or a list of one kind.
pub(crate) trait Outputs<B: Member>: Sized {
    /// One [`Spec`] per result.
    type Specs;
    type Primitives;
    fn specs(specs: Self::Specs) -> Vec<Spec>;
    fn erase(results: Self::Primitives) -> Vec<Value<B>>;
    fn restore(tensors: Vec<Tensor<B>>) -> Self;
    fn full(index: usize) -> Full<B>;
}

impl<B: Member, K: Kind<B>> Outputs<B> for ReplicaTensor<B, K> {
    type Specs = Spec;
    type Primitives = K::Primitive;

    fn specs(spec: Spec) -> Vec<Spec> {
        vec![spec]
    }

    fn erase(result: K::Primitive) -> Vec<Value<B>> {
        vec![K::erase(result)]
    }

    fn restore(tensors: Vec<Tensor<B>>) -> Self {
        Self::new(tensors.into_iter().next().expect("one result"))
    }

    fn full(_index: usize) -> Full<B> {
        K::full
    }
}

impl<B: Member, K: Kind<B>, L: Kind<B>> Outputs<B> for (ReplicaTensor<B, K>, ReplicaTensor<B, L>) {
    type Specs = (Spec, Spec);
    type Primitives = (K::Primitive, L::Primitive);

    fn specs((first, second): Self::Specs) -> Vec<Spec> {
        vec![first, second]
    }

    fn erase((first, second): Self::Primitives) -> Vec<Value<B>> {
        vec![K::erase(first), L::erase(second)]
    }

    fn restore(tensors: Vec<Tensor<B>>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("two results");
        (ReplicaTensor::new(next()), ReplicaTensor::new(next()))
    }

    fn full(index: usize) -> Full<B> {
        if index == 0 { K::full } else { L::full }
    }
}

impl<B: Member, K: Kind<B>> Outputs<B> for Vec<ReplicaTensor<B, K>> {
    type Specs = Vec<Spec>;
    type Primitives = Vec<K::Primitive>;

    fn specs(specs: Vec<Spec>) -> Vec<Spec> {
        specs
    }

    fn erase(results: Self::Primitives) -> Vec<Value<B>> {
        results.into_iter().map(K::erase).collect()
    }

    fn restore(tensors: Vec<Tensor<B>>) -> Self {
        tensors.into_iter().map(ReplicaTensor::new).collect()
    }

    fn full(_index: usize) -> Full<B> {
        K::full
    }
}

/// Input shapes, for messages.
struct Shapes<'a, B: Member>(&'a [Option<Tensor<B>>]);

impl<B: Member> std::fmt::Display for Shapes<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, input) in self.0.iter().flatten().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{} {:?}", input.shape, input.dtype)?;
        }
        Ok(())
    }
}

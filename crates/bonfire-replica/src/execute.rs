//! One operation: decide where it runs, then run it, at home or on every member.

use std::{ops::Range, sync::Arc};

use bonfire_collectives::CollectiveError;
use bonfire_placement::{Lengths, Op, Operand, PartialOp, Placement, Plan};
use burn_backend::{DType, MetadataError, Scalar, Shape};
use crossbeam_channel::{Sender, bounded};

use crate::{
    Member, ReplicaDevice, Spread,
    balance::Cost,
    expand,
    group::{MemberContext, Order, Task},
    memory::{self, MemoryKind, Step},
    operands::{Distance, Inputs, Outputs},
    redistribute::{Scope, Source},
    tensor::{Parts, Reading, Storage, Sum, Tensor},
    value::{Full, Value, identity},
};

/// What must be known of an operation at once: the rest is an outline that is asked for when it is needed.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    /// Named in errors.
    name: &'static str,
    /// Multiply-adds, for the operations that may spread tensors that are still at home; 0 for all others.
    work: usize,
}

impl Call {
    /// An operation that runs where its inputs are.
    #[inline]
    pub(crate) fn light(name: &'static str) -> Self {
        Self { name, work: 0 }
    }

    /// One that may be worth spreading its inputs.
    #[inline]
    pub(crate) fn heavy(name: &'static str, work: usize) -> Self {
        Self { name, work }
    }
}

/// How an operation can be shared.
pub(crate) struct Rule {
    op: Op,
    /// The rule speaks of the first `num_planned` inputs; those after them (indices, say) are needed whole.
    num_planned: usize,
    linearity: Linearity,
    /// Whether each element of the output is made of the elements that broadcasting puts beside each other.
    is_elementwise: bool,
    /// Where the first input, zeros that lie nowhere, is taken to be.
    following: Option<Placement>,
}

impl Rule {
    pub(crate) fn new(op: Op) -> Self {
        let linearity = Linearity::Nonlinear;
        Self { op, num_planned: usize::MAX, linearity, is_elementwise: false, following: None }
    }

    /// Of an operation whose members compute their own elements.
    pub(crate) fn elementwise(linearity: Linearity) -> Self {
        let op = Op::Aligned { blocked: Vec::new(), num_outputs: 1 };
        Self { linearity, is_elementwise: true, ..Self::new(op) }
    }

    pub(crate) fn planned(self, num_planned: usize) -> Self {
        Self { num_planned, ..self }
    }

    pub(crate) fn linear(self) -> Self {
        Self { linearity: Linearity::Linear, ..self }
    }

    /// Of an operation that is shared as its first input is, which is zeros: they take this placement, if any.
    pub(crate) fn following(self, placement: Option<Placement>) -> Self {
        Self { following: placement, ..self }
    }

    pub(crate) fn linear_in(self, index: usize) -> Self {
        Self { linearity: Linearity::In(index), ..self }
    }
}

/// Whether an operation on sums that are not formed yet can run on their parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linearity {
    /// No: it needs the values.
    Nonlinear,
    /// Yes: it moves elements or changes signs, which gives the same bits; or it adds sums, which gives those of another
    /// order of summation, fixed by the program.
    Linear,
    /// Yes, but it rounds each part: only where nobody else will form the same sum, for a tensor that was never cloned.
    Scaling,
    /// Yes, in the input of this index, while the members hold all others whole: it moves or adds elements.
    In(usize),
}

/// What an output will be, told without running the operation.
#[derive(Clone)]
pub(crate) enum Spec {
    /// Promised to the caller at once, and checked on each member.
    Known(Known),
    /// Only the inner backend knows: the operation runs whole, and is waited for.
    Unknown,
    /// The inputs do not fit: the operation panics on the caller's thread.
    Misfit(MetadataError),
}

impl Spec {
    pub(crate) fn new(shape: impl Into<Shape>, dtype: impl Into<DType>) -> Self {
        Spec::Known(Known { shape: shape.into(), dtype: dtype.into() })
    }

    /// As [`new`](Self::new), for a shape that may not exist.
    pub(crate) fn inferred(shape: Result<Shape, MetadataError>, dtype: impl Into<DType>) -> Self {
        shape.map_or_else(Spec::Misfit, |shape| Spec::new(shape, dtype))
    }
}

/// Global shape and dtype of a result.
#[derive(Clone)]
pub(crate) struct Known {
    shape: Shape,
    dtype: DType,
}

/// Where a body runs: at home on whole tensors, or on a member on its parts.
pub(crate) struct Part<'a> {
    rank: usize,
    /// One per input and output; empty at home.
    inputs: &'a [Placement],
    placements: &'a [Placement],
    /// Empty if the body's own word holds.
    outputs: &'a [Known],
}

impl Part<'_> {
    /// All of it, at home.
    const WHOLE: Part<'static> = Part { rank: 0, inputs: &[], placements: &[], outputs: &[] };

    /// The shape that this part of output `index` must have, of a whole that the caller asked to be of shape `whole`.
    pub(crate) fn shape(&self, index: usize, whole: &Shape) -> Shape {
        let whole = self.outputs.get(index).map_or(whole, |output| &output.shape);
        match self.placements.get(index) {
            Some(placement) => Shape::from(placement.local_shape(whole, self.rank)),
            None => whole.clone(),
        }
    }

    /// The dim of which the members share the first input, and this member's rows of it.
    pub(crate) fn rows(&self) -> Option<(usize, Range<usize>)> {
        match self.inputs.first() {
            Some(Placement::Shard { dim, lengths }) => Some((*dim, lengths.range(self.rank))),
            Some(_) | None => None,
        }
    }

    /// Whether a member runs the body.
    pub(crate) fn is_member(&self) -> bool {
        !self.placements.is_empty()
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
#[inline(always)]
pub(crate) fn apply<B, I, O>(
    call: Call,
    inputs: I,
    outline: impl FnOnce(&I) -> (Rule, O::Specs),
    body: impl Fn(I::Primitives, &Part) -> O::Primitives + Send + Sync + 'static,
) -> O
where
    B: Member,
    I: Inputs<B>,
    O: Outputs<B>,
{
    let device = inputs.device(call.name);
    device.group.assert_whole();
    let distance = inputs.distance();
    if distance < Distance::Away && !worth_spreading(&call, device) {
        // The way of every operation while nothing is spread: no more than the inner backend's own call, and a handle.
        let (device, primitives) = inputs.into_home();
        return O::at_home(body(primitives, &Part::WHOLE), device, distance);
    }
    let device = device.clone();
    let (rule, specs) = outline(&inputs);
    O::restore(apply_erased::<B, I, O>(call, rule, inputs.erase(), &O::specs(specs), &device, body))
}

/// As [`apply`], where some input is not simply at home or the operation is worth spreading.
#[inline(never)]
fn apply_erased<B, I, O>(
    call: Call,
    mut rule: Rule,
    mut inputs: Vec<Option<Tensor<B>>>,
    specs: &[Spec],
    device: &ReplicaDevice<B>,
    body: impl Fn(I::Primitives, &Part) -> O::Primitives + Send + Sync + 'static,
) -> Vec<Tensor<B>>
where
    B: Member,
    I: Inputs<B>,
    O: Outputs<B>,
{
    let mut known = resolve(&call, &inputs, specs);
    let mut expanded = None;
    if let Some([output]) = known.as_deref_mut() {
        if expand::repeats_storage(&rule.op, &inputs) {
            let input = inputs.into_iter().flatten().next().expect("a view has an input");
            return vec![Tensor { shape: output.shape.clone(), ..input }];
        }
        if let Some(stored) = expand::on_stored(&rule.op, rule.is_elementwise, &mut inputs, &output.shape) {
            rule.op = stored.op;
            expanded = Some(std::mem::replace(&mut output.shape, stored.shape));
        }
    }

    // What is too little to be worth sharing stays whole where the members hold it whole.
    let is_shared = || inputs.iter().flatten().any(Tensor::is_sharded);
    if known.is_none() || call.work > 0 && !worth_spreading(&call, device) && !is_shared() {
        rule.op = Op::Whole { num_outputs: specs.len() };
    }
    let plan = plan(call.name, &rule, &inputs, device);
    let is_spread = inputs.iter().flatten().any(|input| input.storage.placement.is_spread());
    let is_split = plan.outputs.iter().any(|placement| !matches!(placement, Placement::Replicate));
    let is_worth_it = || rule.following.is_some() || worth_spreading(&call, device);
    let mut outputs = if is_spread || is_split && is_worth_it() {
        apply_spread::<B, I, O>(call, &rule, inputs, known, plan, device, body)
    } else {
        let values = inputs.into_iter().map(|input| input.map(Tensor::into_home)).collect();
        let part = Part { outputs: known.as_deref().unwrap_or_default(), ..Part::WHOLE };
        let results = O::erase(body(I::restore(values), &part));
        results.into_iter().map(|value| Tensor::at_home(value, device.clone())).collect()
    };
    if let Some(shape) = expanded {
        outputs[0].shape = shape;
    }
    outputs
}

/// Runs the body on every member.
fn apply_spread<B, I, O>(
    call: Call,
    rule: &Rule,
    inputs: Vec<Option<Tensor<B>>>,
    known: Option<Vec<Known>>,
    plan: Plan,
    device: &ReplicaDevice<B>,
    body: impl Fn(I::Primitives, &Part) -> O::Primitives + Send + Sync + 'static,
) -> Vec<Tensor<B>>
where
    B: Member,
    I: Inputs<B>,
    O: Outputs<B>,
{
    let is_statistic = gives_statistic(&rule.op, &inputs);
    let (reply, replies) = known.is_none().then(|| bounded(1)).unzip();
    let order = device.group.order();
    form_sums(&order, &call, &inputs, &plan);
    let operands = memory_operands(&inputs, &plan);
    let kinds = plan.outputs.iter().map(|output| memory_kind(&call, rule, &operands, output));
    let parts: Vec<_> = kinds.map(|kind| Parts::new(&device.group.memory, kind)).collect();
    let task = OpTask::<B, _> {
        name: call.name,
        idle: idle_members(&plan, device.num_members()),
        inputs: plan.inputs.clone(),
        sources: sources(&order, &call, inputs, plan.inputs, rule.is_elementwise),
        targets: parts.clone(),
        placements: plan.outputs.clone(),
        outputs: known.clone(),
        full: O::full,
        reply,
        body: move |values: Vec<Option<Value<B>>>, part: &Part| O::erase(body(I::restore(values), part)),
    };
    order.enqueue(Arc::new(task));
    drop(order);

    let known = known.unwrap_or_else(|| {
        let replies = replies.expect("a reply is awaited when nothing is known");
        let told = device.group.collect(&replies, [0]).unwrap_or_else(|error| panic!("{error}"));
        told.into_iter().next().expect("the first member tells").1
    });
    let outputs = known.into_iter().zip(plan.outputs).zip(parts).map(|((known, placement), parts)| {
        let Known { shape, dtype } = known;
        let storage = match placement {
            Placement::Partial { op: PartialOp::Sum } => {
                device.group.pending.add(shape.clone(), dtype, parts, is_statistic)
            }
            placement => Arc::new(Storage::spread(placement, shape.clone(), dtype, parts)),
        };
        Tensor { shape, device: device.clone(), storage }
    });
    outputs.collect()
}

impl<B: Member> Tensor<B> {
    /// Shares a fresh tensor out along dim 0 if the device is set to do so at once.
    pub(crate) fn spread_if_eager(self) -> Self {
        let group = &self.device.group;
        let quantized = matches!(self.storage.dtype, DType::QFloat(_));
        if group.options.spread != Spread::Eager || quantized {
            return self;
        }
        let placement = match self.shape.first() {
            Some(&length) if length > 1 => {
                let lengths = group.shares().lengths(length, group.num_members());
                Placement::shard(0, lengths.expect("shares were checked when the group was made"))
            }
            _ => Placement::Replicate,
        };
        let (shape, dtype, device) = (self.shape.clone(), self.storage.dtype, self.device.clone());
        let order = device.group.order();
        let Source::Parts { parts, .. } = order.source(self, &placement, Reading::Take) else {
            panic!("a fresh tensor is no fill")
        };
        drop(order);
        Tensor::new(shape.clone(), device, Storage::spread(placement, shape, dtype, parts))
    }
}

#[inline(always)]
fn worth_spreading<B: Member>(call: &Call, device: &ReplicaDevice<B>) -> bool {
    call.work >= device.group.min_work
}

/// The outputs' shapes and dtypes, or `None` if only running the operation tells.
///
/// # Panics
///
/// If the inputs do not fit.
fn resolve<B: Member>(call: &Call, inputs: &[Option<Tensor<B>>], specs: &[Spec]) -> Option<Vec<Known>> {
    specs
        .iter()
        .map(|spec| match spec {
            Spec::Known(known) => Some(known.clone()),
            Spec::Unknown => None,
            Spec::Misfit(error) => panic!("{}: {error:?} for inputs {}", call.name, Shapes(inputs)),
        })
        .collect()
}

fn plan<B: Member>(name: &'static str, rule: &Rule, inputs: &[Option<Tensor<B>>], device: &ReplicaDevice<B>) -> Plan {
    if let Some(plan) = linear_plan(rule.linearity, inputs) {
        return plan;
    }
    let mut operands: Vec<Operand> = inputs
        .iter()
        .take(rule.num_planned)
        .flatten()
        .map(|input| Operand { placement: input.storage.planned(), shape: &input.shape })
        .collect();
    if let (Some(placement), Some(first)) = (&rule.following, operands.first_mut()) {
        first.placement = placement;
    }
    rule.op
        .plan(&operands, &device.group.shares(), device.num_members())
        .unwrap_or_else(|error| panic!("{name}: {error}, for inputs {}", Shapes(inputs)))
}

/// A linear operation on parts of sums gives parts of a sum. Zeros are a sum of zeros.
fn linear_plan<B: Member>(linearity: Linearity, inputs: &[Option<Tensor<B>>]) -> Option<Plan> {
    let sum = Placement::Partial { op: PartialOp::Sum };
    let is_sum = |input: &Tensor<B>| *input.storage.planned() == sum;
    let placement = |index: usize, input: &Tensor<B>| {
        let is_zero = || input.storage.is_zero_fill();
        match (linearity, input.storage.planned()) {
            (Linearity::Linear, _) if is_sum(input) || is_zero() => Some(sum.clone()),
            (Linearity::Scaling, _) if is_sum(input) && input.storage.is_open_to_one() || is_zero() => {
                Some(sum.clone())
            }
            (Linearity::In(linear), Placement::Partial { .. }) if index == linear && is_sum(input) => Some(sum.clone()),
            (Linearity::In(_), Placement::Local | Placement::Fill | Placement::Replicate) => Some(Placement::Replicate),
            (Linearity::Nonlinear | Linearity::Linear | Linearity::Scaling | Linearity::In(_), _) => None,
        }
    };
    let present = || inputs.iter().flatten();
    let placements = present().enumerate().map(|(index, input)| placement(index, input)).collect::<Option<_>>()?;
    present().any(is_sum).then(|| Plan { inputs: placements, outputs: vec![sum.clone()] })
}

/// Whether a sum in parts that comes out is one that the program asked for by name, or made of such alone.
fn gives_statistic<B: Member>(op: &Op, inputs: &[Option<Tensor<B>>]) -> bool {
    let is_reduction = matches!(op, Op::Reduce { .. } | Op::ReduceAll { .. });
    let is_statistic = |input: &Tensor<B>| input.storage.as_sum().is_some_and(Sum::is_statistic);
    is_reduction || inputs.iter().flatten().all(is_statistic)
}

/// The inputs as far as they say what outputs are used for: what the members share is told from its placement alone.
fn memory_operands<B: Member>(inputs: &[Option<Tensor<B>>], plan: &Plan) -> Vec<memory::Operand> {
    if plan.outputs.iter().all(|placement| matches!(placement, Placement::Shard { .. })) {
        return Vec::new();
    }
    let mut placements = plan.inputs.iter();
    let operands = inputs.iter().flatten().map(|input| {
        // Zeros are a sum only beside one.
        let is_sum = matches!(placements.next(), Some(Placement::Partial { .. })) && !input.storage.is_zero_fill();
        let is_last = Arc::strong_count(&input.storage) == 1;
        memory::Operand { kind: input.storage.memory_kind(), is_sum, is_last }
    });
    operands.collect()
}

/// What an output will be used for, as far as the operation tells.
fn memory_kind(call: &Call, rule: &Rule, operands: &[memory::Operand], output: &Placement) -> MemoryKind {
    match output {
        Placement::Shard { .. } | Placement::Partial { op: PartialOp::Max | PartialOp::Min } => MemoryKind::Activations,
        Placement::Partial { op: PartialOp::Sum } => {
            memory::of_sum(matches!(rule.op, Op::Reduce { .. } | Op::ReduceAll { .. }), operands)
        }
        Placement::Local | Placement::Fill | Placement::Replicate => {
            let step = match rule.op {
                Op::Reshape { .. } | Op::Permute { .. } | Op::Expand { .. } | Op::Narrow { .. } => Step::View,
                _ if call.name == "float_sub" => Step::Difference,
                _ if rule.is_elementwise => Step::Elementwise,
                _ => Step::Other,
            };
            memory::of_whole(step, operands)
        }
    }
}

/// Forms the sums that the plan needs as values. What meets something sharded (batch statistics), or enters a product, is
/// formed alone; any other operation on whole values (an optimizer, a norm to clip by) brings all that the calling thread
/// has pending.
fn form_sums<B: Member>(order: &Order<B>, call: &Call, inputs: &[Option<Tensor<B>>], plan: &Plan) {
    let is_shard = |placement: &Placement| matches!(placement, Placement::Shard { .. });
    let scope = if call.work > 0 || plan.inputs.iter().any(is_shard) { Scope::These } else { Scope::AllPending };
    let mut placements = plan.inputs.iter();
    let is_value = |wanted: &Placement| !matches!(wanted, Placement::Partial { .. });
    let asked = inputs.iter().flatten().filter(|_| placements.next().is_none_or(is_value));
    order.form_sums(asked.map(|input| &input.storage), scope);
}

fn sources<B: Member>(
    order: &Order<B>,
    call: &Call,
    inputs: Vec<Option<Tensor<B>>>,
    placements: Vec<Placement>,
    is_elementwise: bool,
) -> Vec<Option<Source<B>>> {
    // The masks of an attention are none.
    let is_shared = placements.iter().any(|placement| matches!(placement, Placement::Shard { .. }));
    let has_parameters = is_shared && call.work > 0 && call.name != "attention";
    let mut placements = placements.into_iter();
    let mut earlier: Vec<*const Storage<B>> = Vec::with_capacity(inputs.len());
    let mut sources = Vec::with_capacity(inputs.len());
    for (index, input) in inputs.into_iter().enumerate() {
        sources.push(input.map(|input| {
            let storage = Arc::as_ptr(&input.storage);
            // One tensor may come twice, in two placements: what the first reading needs must not be used up by the
            // move that the second one asks for, since moves run before the operation.
            let moving = if earlier.contains(&storage) { Reading::Share } else { Reading::Take };
            earlier.push(storage);
            let placement = placements.next().unwrap_or(Placement::Replicate);
            let source = order.source(input, &placement, moving);
            if has_parameters && placement == Placement::Replicate {
                source.note_parameter();
            }
            // A second operand is broadcast by the operation itself.
            if is_elementwise && index > 0 { source.viewed() } else { source }
        }));
    }
    sources
}

/// Per member: whether it has no part of what comes out, or, of a sum, nothing to add.
fn idle_members(plan: &Plan, num_members: usize) -> Vec<bool> {
    fn lengths(placements: &[Placement]) -> Vec<&Lengths> {
        let shared = placements.iter().filter_map(|placement| match placement {
            Placement::Shard { lengths, .. } => Some(lengths),
            _ => None,
        });
        shared.collect()
    }
    let outputs = lengths(&plan.outputs);
    let deciding = if outputs.is_empty() { lengths(&plan.inputs) } else { outputs };
    (0..num_members).map(|rank| deciding.iter().any(|lengths| lengths.of(rank) == 0)).collect()
}

/// One operation, on each member's parts.
struct OpTask<B: Member, F> {
    name: &'static str,
    /// Of the inputs that are there.
    inputs: Vec<Placement>,
    sources: Vec<Option<Source<B>>>,
    targets: Vec<Arc<Parts<B>>>,
    placements: Vec<Placement>,
    /// `None` if only the results tell.
    outputs: Option<Vec<Known>>,
    idle: Vec<bool>,
    full: fn(usize) -> Full<B>,
    /// Told by the first member what came out, if nobody knew before.
    reply: Option<Sender<(usize, Vec<Known>)>>,
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

    fn cost(&self, rank: usize) -> Cost {
        Cost::of(self.placements.iter().chain(&self.inputs), rank)
    }

    fn run(&self, member: &MemberContext<B>) -> Result<(), CollectiveError> {
        let values: Vec<_> =
            self.sources.iter().map(|source| source.as_ref().map(|source| source.fetch(member))).collect();
        let results = match &self.outputs {
            Some(outputs) if self.idle[member.rank] => self.nothing(outputs, member),
            outputs => {
                let outputs = outputs.as_deref().unwrap_or_default();
                let part = Part { rank: member.rank, inputs: &self.inputs, placements: &self.placements, outputs };
                (self.body)(values, &part)
            }
        };
        if let Some(reply) = self.reply.as_ref().filter(|_| member.rank == 0) {
            let told = results.iter().map(|value| Known { shape: value.shape(), dtype: value.dtype() });
            // The caller may have given up waiting.
            let _ = reply.send((member.rank, told.collect()));
        }
        for (index, (result, target)) in results.into_iter().zip(&self.targets).enumerate() {
            target.set(member, self.checked(index, result, member.rank));
        }
        Ok(())
    }
}

impl<B: Member, F> OpTask<B, F> {
    /// What a member without a share gives: an empty part, or what changes no sum.
    fn nothing(&self, outputs: &[Known], member: &MemberContext<B>) -> Vec<Value<B>> {
        (self.placements.iter().zip(outputs).enumerate())
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
    fn checked(&self, index: usize, result: Value<B>, rank: usize) -> Value<B> {
        let Some(known) = self.outputs.as_ref().map(|outputs| &outputs[index]) else { return result };
        let result = result.with_bool_dtype(known.dtype);
        let shape = Shape::from(self.placements[index].local_shape(&known.shape, rank));
        let (found, dtype) = (result.shape(), result.dtype());
        assert!(
            found == shape && dtype == known.dtype,
            "{} gave {found} {dtype:?} where {shape} {:?} was expected",
            self.name,
            known.dtype
        );
        result
    }
}

/// Input shapes, for messages.
struct Shapes<'a, B: Member>(&'a [Option<Tensor<B>>]);

impl<B: Member> std::fmt::Display for Shapes<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, input) in self.0.iter().flatten().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{} {:?}", input.shape, input.storage.dtype)?;
        }
        Ok(())
    }
}

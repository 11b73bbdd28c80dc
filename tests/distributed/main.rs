//! Burn's feature `distributed` turned on: `Autodiff` then demands more of its backend, and parameters may be marked.
//!
//! `Autodiff<Flex>` is no autodiff backend under this feature, so what a replica is compared with are gradients written
//! out by hand, in operations of plain Flex.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bonfire::{Replica, ReplicaDevice, ReplicaOptions, Spread, collectives::Collective};
use burn::{
    backend::Autodiff,
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    nn::{Linear, Relu},
    optim::{GradientsParams, Optimizer, SgdConfig},
    tensor::{
        Tensor, TensorData, TensorPrimitive,
        backend::{
            Backend, DeviceOps,
            distributed::{DistributedBackend, DistributedConfig, DistributedParamId, ReduceOperation},
        },
    },
};
use burn_flex::{Flex, FlexDevice};

type B = Replica<Flex>;
type Ad = Autodiff<B>;

const BATCH_SIZE: usize = 7;
const LENGTHS: [usize; 3] = [12, 16, 5];
const LEARNING_RATE: f64 = 0.5;
const NUM_STEPS: usize = 12;
const MEAN: DistributedConfig = DistributedConfig { all_reduce_op: ReduceOperation::Mean };

/// `[batch, 12]` to `[batch, 5]`.
#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn init(device: &B::Device) -> Self {
        let linear = |seed, input, output| Linear {
            weight: Param::from_tensor(numbers(seed, [input, output], device)),
            bias: Some(Param::from_tensor(numbers(seed + 1, [1, output], device).reshape([output]))),
        };
        let [input, hidden, output] = LENGTHS;
        Self { hidden: linear(1, input, hidden), output: linear(3, hidden, output) }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.output.forward(Relu::new().forward(self.hidden.forward(x)))
    }
}

/// Numbers in [-0.5, 0.5] that depend on nothing but `seed` and their position.
fn numbers<B: Backend>(seed: usize, shape: [usize; 2], device: &B::Device) -> Tensor<B, 2> {
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|i| 0.5 * ((seed * 131 + i * 17) as f32).sin()).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn batch<B: Backend>(step: usize, device: &B::Device) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let [input, _, output] = LENGTHS;
    (numbers(100 + step, [BATCH_SIZE, input], device), numbers(200 + step, [BATCH_SIZE, output], device))
}

/// Marks every parameter as Burn's data parallel learner does.
struct Mark;

impl ModuleMapper<Ad> for Mark {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Ad, D>>) -> Param<Tensor<Ad, D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.set_distributed(DistributedParamId::from(id.val())), mapper)
    }
}

/// How many parameters are marked, of how many, and all their values.
#[derive(Default)]
struct Parameters {
    num_marked: usize,
    num: usize,
    values: Vec<f32>,
}

impl ModuleVisitor<Ad> for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Ad, D>>) {
        self.num_marked += usize::from(param.val().is_distributed());
        self.num += 1;
        self.values.extend(param.val().into_data().to_vec::<f32>().unwrap());
    }
}

/// Losses, one per step, and the parameters after the last.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<f32>,
    parameters: Vec<f32>,
}

/// Small operations are shared, too.
fn replica(num_members: usize) -> ReplicaDevice<Flex> {
    let options = ReplicaOptions { spread: Spread::OnHeavyOp { min_work: 1 }, ..Default::default() };
    ReplicaDevice::with_options(vec![FlexDevice; num_members], options).unwrap()
}

fn train(device: &ReplicaDevice<Flex>, is_marked: bool) -> Run {
    let mut model = Mlp::<Ad>::init(device);
    if is_marked {
        model = model.map(&mut Mark);
        Ad::start_communication_server(std::slice::from_ref(device), MEAN);
    }
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        let (x, target) = batch(step, device);
        let loss = (model.forward(x) - target).square().mean();
        losses.push(loss.clone().into_scalar());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, grads);
    }
    if is_marked {
        Ad::close_communication_server(device);
    }
    let mut parameters = Parameters::default();
    model.visit(&mut parameters);
    assert_eq!(parameters.num, 4);
    assert_eq!(parameters.num_marked, if is_marked { 4 } else { 0 }, "the optimizer keeps the marks");
    Run { losses, parameters: parameters.values }
}

/// The same run on plain Flex, its gradients by hand.
fn train_by_hand() -> Run {
    let device = FlexDevice;
    let start = Mlp::<Flex>::init(&device);
    let bias = |linear: &Linear<Flex>| linear.bias.as_ref().unwrap().val().unsqueeze::<2>();
    let mut parameters =
        [start.hidden.weight.val(), bias(&start.hidden), start.output.weight.val(), bias(&start.output)];
    let mut losses = Vec::new();
    for step in 0..NUM_STEPS {
        let (x, target) = batch::<Flex>(step, &device);
        let [hidden_weight, hidden_bias, output_weight, output_bias] = parameters.clone();
        let before = x.clone().matmul(hidden_weight) + hidden_bias;
        let hidden = before.clone().clamp_min(0.0);
        let error = hidden.clone().matmul(output_weight.clone()) + output_bias - target;
        losses.push(error.clone().square().mean().into_scalar());

        let grad_output = error * (2.0 / (BATCH_SIZE * LENGTHS[2]) as f64);
        let is_active = before.greater_elem(0.0).float();
        let grad_hidden = grad_output.clone().matmul(output_weight.transpose()) * is_active;
        let gradients = [
            x.transpose().matmul(grad_hidden.clone()),
            grad_hidden.sum_dim(0),
            hidden.transpose().matmul(grad_output.clone()),
            grad_output.sum_dim(0),
        ];
        let mut gradients = gradients.into_iter();
        parameters = parameters.map(|parameter| parameter - gradients.next().unwrap() * LEARNING_RATE);
    }
    let values = parameters.into_iter().flat_map(|parameter| parameter.into_data().to_vec::<f32>().unwrap());
    Run { losses, parameters: values.collect() }
}

/// Sums of floats in another order.
fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    const TOLERANCE: f32 = 1e-5;
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= TOLERANCE * (1.0 + b.abs()), "{what} {i}: {a}, by hand {b}");
    }
}

#[test]
fn a_replica_trains_where_autodiff_demands_a_distributed_backend() {
    let by_hand = train_by_hand();
    assert!(by_hand.losses[NUM_STEPS - 1] < 0.9 * by_hand.losses[0], "nothing was learnt: {:?}", by_hand.losses);
    for num_members in 1..=3 {
        let run = train(&replica(num_members), false);
        assert_close(&format!("{num_members} members, loss"), &run.losses, &by_hand.losses);
        assert_close(&format!("{num_members} members, parameter"), &run.parameters, &by_hand.parameters);
    }
}

#[test]
fn marked_parameters_train_bit_for_bit_as_others_do_with_the_same_collectives() {
    for num_members in 1..=3 {
        let (plain, marked) = (replica(num_members), replica(num_members));
        assert_eq!(train(&plain, false), train(&marked, true), "{num_members} members");
        let tallies = [plain, marked].map(|device| device.collectives().tally());
        assert_eq!(tallies[0], tallies[1], "{num_members} members");
        // Each step sums its gradients.
        assert!(tallies[0].num_calls(Collective::AllReduce) >= NUM_STEPS as u64, "{}", tallies[0]);
    }
}

#[test]
fn all_reduce_over_the_own_device_alone_is_the_tensor_itself() {
    let device = replica(2);
    for op in [ReduceOperation::Sum, ReduceOperation::Mean] {
        let x = numbers::<Ad>(5, [6, 4], &device);
        let y = x.clone().matmul(numbers(6, [4, 3], &device));
        let reduced = Ad::all_reduce(y.clone().into_primitive().tensor(), op, vec![device.id()]).resolve();
        let reduced = Tensor::<Ad, 2>::from_primitive(TensorPrimitive::Float(reduced));
        assert_eq!(reduced.into_data(), y.into_data());
    }
}

/// The message of the panic in which `f` ends.
fn refusal<R>(f: impl FnOnce() -> R) -> String {
    let panic = catch_unwind(AssertUnwindSafe(f)).err().expect("several replica devices are refused");
    panic.downcast_ref::<String>().expect("a message").clone()
}

#[test]
fn several_replica_devices_are_refused_and_told_what_to_do_instead() {
    let (one, other) = (replica(2), replica(1));
    let tensor = || numbers::<B>(5, [2, 2], &one).into_primitive().tensor();
    let ids = [one.id(), other.id()];
    let messages = [
        refusal(|| Ad::start_communication_server(&[one.clone(), other.clone()], MEAN)),
        refusal(|| Ad::start_communication_server(&[one.clone(), one.clone()], MEAN)),
        refusal(|| B::all_reduce(tensor(), ReduceOperation::Sum, ids.to_vec())),
        refusal(|| B::all_reduce(tensor(), ReduceOperation::Sum, vec![ids[0], ids[0]])),
        refusal(|| B::all_reduce(tensor(), ReduceOperation::Mean, vec![ids[1]])),
        refusal(|| B::all_reduce(tensor(), ReduceOperation::Mean, vec![])),
    ];
    for message in messages {
        assert!(message.contains("list all member devices in one `ReplicaDevice::new`"), "{message}");
    }
    // Neither is broken by it.
    assert_eq!(train(&one, true), train(&replica(2), false));
}

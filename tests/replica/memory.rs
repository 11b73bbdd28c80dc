//! What `memory_report` says of programs whose bytes can be counted by hand.

use std::time::{Duration, Instant};

use bonfire::{BytesByKind, Member, MemberMemory, MemoryReport, Replica, ReplicaDevice};
use bonfire_tests::text::TextClassifier;
use burn::{
    backend::Autodiff,
    grad_clipping::GradientClippingConfig,
    module::AutodiffModule,
    nn::loss::CrossEntropyLossConfig,
    optim::{
        AdamConfig, AdamWConfig, GradientsParams, Optimizer, SgdConfig, decay::WeightDecayConfig,
        momentum::MomentumConfig,
    },
    tensor::{Int, Tensor, TensorData, backend::Backend},
};
use burn_flex::Flex;
use burn_ndarray::NdArray;

use super::{
    models::{Classifier, Cnn, Mlp},
    runs::{ALWAYS, draw_alone, floats, gradients, replica},
    zoo::text::{CONFIG, texts},
};

type B = Replica<Flex>;
type Ad = Autodiff<B>;

/// Of an f32.
const SIZE: u64 = 4;

/// Running mean and variance of 8 and of 12 channels, which Burn holds twice: the last one and its update.
const CNN_STATISTICS: u64 = 2 * SIZE * 2 * (8 + 12);

fn loss<Bk: Backend, M: Classifier<Bk>>(model: &M, batch_size: usize, device: &Bk::Device) -> Tensor<Bk, 1> {
    let images = floats::<Bk, 4>(7, [batch_size, 1, 12, 12], device);
    cross_entropy(model.forward(images), 10, device)
}

fn cross_entropy<Bk: Backend>(logits: Tensor<Bk, 2>, num_classes: i64, device: &Bk::Device) -> Tensor<Bk, 1> {
    let labels: Vec<i64> = (0..logits.dims()[0] as i64).map(|item| item % num_classes).collect();
    let labels = Tensor::<Bk, 1, Int>::from_data(TensorData::from(labels.as_slice()), device);
    CrossEntropyLossConfig::new().init(device).forward(logits, labels)
}

/// One step; gives the bytes of all gradients too.
fn step<M>(model: M, optimizer: &mut impl Optimizer<M, Ad>, loss: impl FnOnce(&M) -> Tensor<Ad, 1>) -> (M, u64)
where
    M: AutodiffModule<Ad>,
{
    let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
    let num_gradients: usize = gradients(&model, &grads).iter().map(Vec::len).sum();
    (optimizer.step(1e-3, model, grads), SIZE * num_gradients as u64)
}

fn live(report: &MemoryReport) -> Vec<BytesByKind> {
    report.members.iter().map(|member| member.live).collect()
}

/// Every member holds the parameters and `times` as much of the optimizer, `other` bytes, and no gradient nor activation.
fn assert_between_steps(name: &str, report: &MemoryReport, parameters: u64, times: u64, other: u64) {
    let expected = BytesByKind { parameters, optimizer_state: times * parameters, other, ..BytesByKind::default() };
    for live in live(report) {
        assert_eq!(live, expected, "{name}:\n{report}");
    }
    assert_eq!(report.home.live_bytes, 0, "{name}:\n{report}");
}

fn assert_optimizers<M: Classifier<Ad> + AutodiffModule<Ad>>(name: &str, statistics: u64) {
    fn after_two_steps<M: Classifier<Ad> + AutodiffModule<Ad>, O: Optimizer<M, Ad>>(
        mut optimizer: O,
    ) -> (MemoryReport, u64) {
        let device = replica::<Flex>(3, ALWAYS);
        let mut model = M::init(&device);
        let mut bytes = 0;
        for _ in 0..2 {
            (model, bytes) = step(model, &mut optimizer, |model| loss(model, 9, &device));
        }
        (device.memory_report(), bytes)
    }
    let clipping = || Some(GradientClippingConfig::Norm(0.5));
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let decay = AdamConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.1)));
    let cases = [
        ("SGD", after_two_steps::<M, _>(SgdConfig::new().init()), 0),
        ("SGD with momentum", after_two_steps::<M, _>(momentum.init()), 1),
        ("Adam", after_two_steps::<M, _>(AdamConfig::new().init()), 2),
        ("Adam with weight decay", after_two_steps::<M, _>(decay.init()), 2),
        ("AdamW", after_two_steps::<M, _>(AdamWConfig::new().init()), 2),
        ("AdamW, clipped", after_two_steps::<M, _>(AdamWConfig::new().with_grad_clipping(clipping()).init()), 2),
    ];
    for (optimizer, (report, parameters), times) in cases {
        assert_between_steps(&format!("{name}, {optimizer}"), &report, parameters, times, statistics);
    }
}

#[test]
fn between_steps_members_hold_the_parameters_and_the_optimizers_state_to_the_byte() {
    let _alone = draw_alone();
    assert_optimizers::<Mlp<Ad>>("MLP", 0);
    assert_optimizers::<Cnn<Ad>>("CNN", CNN_STATISTICS);
}

/// Burn's momentum starts as the first gradient itself.
#[test]
fn the_first_momentum_is_the_first_gradient() {
    let _alone = draw_alone();
    let device = replica::<Flex>(2, ALWAYS);
    let mut optimizer = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let (_model, bytes) = step(Mlp::<Ad>::init(&device), &mut optimizer, |model| loss(model, 8, &device));
    let report = device.memory_report();
    let expected = BytesByKind { parameters: bytes, gradients: bytes, ..Default::default() };
    assert_eq!(live(&report), [expected; 2], "{report}");
}

#[test]
fn a_step_has_each_kind_at_its_time_and_leaves_nothing() {
    let _alone = draw_alone();
    let device = replica::<Flex>(2, ALWAYS);
    let mut optimizer = AdamConfig::new().init();
    let model = Mlp::<Ad>::init(&device);
    let parameters = SIZE * (144 * 64 + 64 + 64 * 10 + 10);

    let loss = loss(&model, 8, &device);
    let report = device.memory_report();
    for live in live(&report) {
        assert_eq!((live.parameters, live.gradients, live.optimizer_state), (parameters, 0, 0), "{report}");
        // At least the hidden layer: 4 of 8 rows of 64 numbers.
        assert!(live.activations > SIZE * 4 * 64, "{report}");
    }
    // The whole batch and, as long as the model holds them, its first parameters.
    assert!(report.home.live_bytes >= SIZE * 8 * 144, "{report}");

    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let report = device.memory_report();
    for live in live(&report) {
        assert_eq!((live.parameters, live.gradients, live.optimizer_state), (parameters, parameters, 0), "{report}");
        // The loss, which is still held.
        assert_eq!(live.activations, SIZE, "{report}");
    }

    let model = optimizer.step(1e-3, model, grads);
    drop(loss);
    let report = device.memory_report();
    assert_between_steps("after the step", &report, parameters, 2, 0);
    for member in &report.members {
        let MemberMemory { live, peak, most } = member;
        assert!(peak.total() > live.total() && most.gradients >= parameters, "{report}");
        assert!(most.total() >= peak.total(), "{report}");
    }

    device.reset_peak_memory();
    let report = device.memory_report();
    assert!(report.members.iter().all(|member| member.peak == member.live && member.most == member.live), "{report}");

    drop((model, optimizer));
    let report = device.memory_report();
    assert_eq!(live(&report), [BytesByKind::default(); 2], "{report}");
    assert_eq!((report.home.live_bytes, report.balance()), (0, 1.0), "{report}");
}

#[test]
fn a_view_is_counted_once_and_keeps_its_buffer() {
    let device = replica::<Flex>(2, ALWAYS);
    let x = floats::<B, 2>(1, [8, 6], &device).matmul(floats(2, [6, 4], &device));
    let activations = || live(&device.memory_report()).map_activations();
    assert_eq!(activations(), [4 * 4 * SIZE; 2]);
    let view = x.clone().reshape([8, 2, 2]).swap_dims(1, 2);
    assert_eq!(activations(), [4 * 4 * SIZE; 2]);
    drop(x);
    assert_eq!(activations(), [4 * 4 * SIZE; 2]);
    let copy = view.clone() + 1.0;
    assert_eq!(activations(), [2 * 4 * 4 * SIZE; 2]);
    drop(view);
    assert_eq!(activations(), [4 * 4 * SIZE; 2]);
    drop(copy);
    assert_eq!(activations(), [0; 2]);
}

trait Activations {
    fn map_activations(self) -> Vec<u64>;
}

impl Activations for Vec<BytesByKind> {
    fn map_activations(self) -> Vec<u64> {
        self.iter().map(|bytes| bytes.activations).collect()
    }
}

/// A backend that does not say where its buffers are.
#[test]
fn tensors_of_any_backend_are_counted_at_least_one_by_one() {
    type N = Replica<NdArray<f64>>;
    let device = replica::<NdArray<f64>>(2, ALWAYS);
    let x = floats::<N, 2>(1, [8, 6], &device).matmul(floats(2, [6, 4], &device));
    assert_eq!(live(&device.memory_report()).map_activations(), [4 * 4 * 8; 2]);
    drop(x);
    assert_eq!(live(&device.memory_report()).map_activations(), [0; 2]);
}

#[test]
fn values_at_home_are_reported_apart_while_somebody_holds_them() {
    let device = replica::<Flex>(2, ALWAYS);
    // Smaller ones have no storage of their own to be kept in.
    let (x, weight) = (floats::<B, 2>(1, [64, 32], &device), floats::<B, 2>(2, [32, 4], &device));
    let product = x.clone().matmul(weight);
    let report = device.memory_report();
    assert_eq!(report.home.live_bytes, SIZE * 64 * 32, "{report}");
    // Its parts, and those of the product; the weight went into the product.
    assert_eq!(live(&report), [BytesByKind { activations: SIZE * 32 * (32 + 4), ..Default::default() }; 2]);
    drop((x, product));
    let report = device.memory_report();
    assert_eq!((report.home.live_bytes, live(&report)), (0, vec![BytesByKind::default(); 2]));
}

#[test]
fn groups_count_apart() {
    let (one, other) = (replica::<Flex>(2, ALWAYS), replica::<Flex>(3, ALWAYS));
    let x = floats::<B, 2>(1, [6, 6], &one).matmul(floats(2, [6, 4], &one));
    assert_eq!(live(&one.memory_report()).map_activations(), [3 * 4 * SIZE; 2]);
    assert_eq!(other.memory_report().members, [MemberMemory::default(); 3]);
    drop(x);
}

/// Of two steps after the first, in which members that share memory share the parameters that came from home: whoever
/// updates them first copies them.
fn peaks<M: AutodiffModule<Ad>>(
    num_members: usize,
    init: impl Fn(&ReplicaDevice<Flex>) -> M,
    mut optimizer: impl Optimizer<M, Ad>,
    loss: impl Fn(&M, &ReplicaDevice<Flex>) -> Tensor<Ad, 1>,
) -> MemoryReport {
    let device = replica::<Flex>(num_members, ALWAYS);
    let (mut model, _) = step(init(&device), &mut optimizer, |model| loss(model, &device));
    device.reset_peak_memory();
    for _ in 0..2 {
        (model, _) = step(model, &mut optimizer, |model| loss(model, &device));
    }
    device.memory_report()
}

fn cnn_peaks(num_members: usize) -> MemoryReport {
    peaks(num_members, Cnn::<Ad>::init, AdamConfig::new().init(), |model, device| loss(model, 24, device))
}

fn text_model(device: &ReplicaDevice<Flex>) -> TextClassifier<Ad> {
    TextClassifier::new(&CONFIG, device)
}

fn text_loss(model: &TextClassifier<Ad>, device: &ReplicaDevice<Flex>) -> Tensor<Ad, 1> {
    cross_entropy(model.forward(texts(1, 12, device)), 4, device)
}

#[test]
fn a_transformer_holds_its_parameters_and_adams_state_between_steps() {
    let _alone = draw_alone();
    let device = replica::<Flex>(3, ALWAYS);
    let mut optimizer = AdamConfig::new().init();
    let (model, _) = step(text_model(&device), &mut optimizer, |model| text_loss(model, &device));
    let (_model, bytes) = step(model, &mut optimizer, |model| text_loss(model, &device));
    assert_between_steps("transformer", &device.memory_report(), bytes, 2, 0);
}

/// torch.nn.DataParallel gathers outputs and makes the loss on device 0, which then holds far more than the others.
#[test]
fn members_with_equal_shares_have_equal_peaks() {
    let _alone = draw_alone();
    for num_members in 2..=4 {
        let loss = |model: &Mlp<Ad>, device: &ReplicaDevice<Flex>| loss(model, 24, device);
        let reports = [
            ("MLP", peaks(num_members, Mlp::<Ad>::init, AdamConfig::new().init(), loss)),
            ("MLP, SGD", peaks(num_members, Mlp::<Ad>::init, SgdConfig::new().init(), loss)),
            ("CNN", cnn_peaks(num_members)),
            ("transformer", peaks(num_members, text_model, AdamConfig::new().init(), text_loss)),
        ];
        for (name, report) in reports {
            println!("{name}, {num_members} members\n{report}");
            assert!(report.balance() <= 1.05, "{name}:\n{report}");
        }
    }
}

#[test]
fn the_peak_of_a_cnns_activations_falls_with_the_number_of_members() {
    let _alone = draw_alone();
    let peak = |num_members| {
        let report = cnn_peaks(num_members);
        report.members.iter().map(|member| member.most.activations).max().unwrap() as f64
    };
    let one = peak(1);
    for num_members in 2..=4 {
        let ratio = peak(num_members) * num_members as f64 / one;
        println!("{num_members} members: {ratio:.3} of one member's share");
        assert!((0.97..=1.05).contains(&ratio), "{num_members} members: {ratio}");
    }
}

/// The losses are added up with their graphs instead of as numbers.
#[test]
fn a_loss_that_is_kept_with_its_graph_keeps_all_activations() {
    let _alone = draw_alone();
    let device = replica::<Flex>(2, ALWAYS);
    let model = Mlp::<Ad>::init(&device);
    let mut total = loss(&model, 8, &device);
    let before = device.memory_report();
    for _ in 0..3 {
        total = total + loss(&model, 8, &device);
    }
    let report = device.memory_report();
    println!("retained graph\n{before}\n{report}");
    for (before, after) in live(&before).iter().zip(live(&report)) {
        assert!(after.activations > 3 * before.activations, "{before:?} {after:?}");
        assert_eq!(after.parameters, before.parameters);
    }
    drop((total.backward(), total));
    let report = device.memory_report();
    assert_eq!(live(&report).map_activations(), [0; 2], "{report}");
}

/// After its backward a loss holds no graph, but its one number stays on every member.
#[test]
fn losses_kept_as_tensors_stay_on_the_members() {
    let _alone = draw_alone();
    let device = replica::<Flex>(2, ALWAYS);
    let mut optimizer = SgdConfig::new().init();
    let mut model = Mlp::<Ad>::init(&device);
    let mut losses = Vec::new();
    for num_kept in 1..=5 {
        (model, _) = step(model, &mut optimizer, |model| {
            let loss = loss(model, 8, &device);
            losses.push(loss.clone());
            loss
        });
        let report = device.memory_report();
        assert_eq!(live(&report).map_activations(), [SIZE * num_kept; 2], "{report}");
    }
    println!("five losses kept\n{}", device.memory_report());
    let numbers: Vec<f32> = losses.into_iter().map(|loss| loss.into_scalar()).collect();
    assert_eq!(numbers.len(), 5);
    let report = device.memory_report();
    assert_eq!(live(&report).map_activations(), [0; 2], "{report}");
}

/// A running average of losses that nobody took out of the graph, and logits kept for a metric.
#[test]
fn what_is_kept_of_a_graph_that_went_backward_is_its_own_values_alone() {
    let _alone = draw_alone();
    let device = replica::<Flex>(2, ALWAYS);
    let mut optimizer = SgdConfig::new().init();
    let mut model = Mlp::<Ad>::init(&device);
    let mut average = Tensor::<Ad, 1>::zeros([1], &device);
    let mut kept = Vec::new();
    for _ in 0..3 {
        (model, _) = step(model, &mut optimizer, |model| {
            let logits = model.forward(floats(7, [8, 1, 12, 12], &device));
            kept.push(logits.clone());
            let loss = cross_entropy(logits, 10, &device);
            average = average.clone() * 0.9 + loss.clone() * 0.1;
            loss
        });
    }
    let report = device.memory_report();
    println!("logits of three batches and an average\n{report}");
    for live in live(&report) {
        let logits = 3 * 4 * 10 * SIZE;
        // A few numbers beside them.
        assert!((logits..=logits + 8 * SIZE).contains(&live.activations), "{report}");
    }
    drop((kept, average));
    let report = device.memory_report();
    assert_eq!(live(&report).map_activations(), [0; 2], "{report}");
}

/// Whether validation passes keep their activations.
#[test]
fn validation_with_the_inner_model_keeps_nothing() {
    let _alone = draw_alone();
    let device = replica::<Flex>(2, ALWAYS);
    let model = Mlp::<Ad>::init(&device);
    let inner = model.valid();
    let pass = |use_inner: bool| match use_inner {
        true => loss(&inner, 8, &device).into_scalar(),
        false => loss(&model, 8, &device).into_scalar(),
    };
    for _ in 0..3 {
        pass(true);
    }
    let report = device.memory_report();
    assert_eq!(live(&report).map_activations(), [0; 2], "{report}");
    for _ in 0..3 {
        pass(false);
    }
    // Kept until some backward pass, of this or any other thread, cleans up.
    println!("three passes without valid()\n{}", device.memory_report());
    drop(loss(&model, 8, &device).backward());
    let report = device.memory_report();
    println!("after a backward\n{report}");
    assert_eq!(live(&report).map_activations(), [0; 2], "{report}");
}

#[test]
fn a_member_that_fails_leaves_the_count_right_and_the_report_readable() {
    let device = replica::<Flex>(2, ALWAYS);
    let x = floats::<B, 2>(1, [8, 6], &device).matmul(floats(2, [6, 4], &device));
    let kept = x.clone() + 1.0;
    let index = Tensor::<B, 1, Int>::from_data([9i64], &device);
    device.memory_report();
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| x.select(1, index).into_data()));
    assert!(failed.is_err());
    let report = device.memory_report();
    let cause = report.broken.clone().expect("the group is broken");
    assert!(cause.contains("float_select") && report.to_string().starts_with("broken: member"), "{report}");
    // The members of a broken group drop what is queued on their own time.
    let comes_down_to = |bytes: u64| {
        let start = Instant::now();
        while live(&device.memory_report()) != [BytesByKind { activations: bytes, ..Default::default() }; 2] {
            assert!(start.elapsed() < Duration::from_secs(10), "{bytes}: {}", device.memory_report());
        }
    };
    comes_down_to(4 * 4 * SIZE);
    drop(kept);
    comes_down_to(0);
}

#[test]
fn a_report_is_written_and_read() {
    let device = replica::<Flex>(2, ALWAYS);
    let x = floats::<B, 2>(1, [8, 6], &device).matmul(floats(2, [6, 4], &device));
    let report = device.memory_report();
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<MemoryReport>(&text).unwrap(), report, "{text}");
    drop(x);
}

/// The hook of a member tells views from buffers.
#[test]
fn flex_tells_which_tensors_share_a_buffer() {
    use bonfire::value::Value;
    use burn_backend::{Shape, TensorData, ops::FloatTensorOps};
    let values = TensorData::from([[1f32, 2.0], [3.0, 4.0]]);
    let tensor = <Flex as FloatTensorOps<Flex>>::float_from_data(values, &Default::default());
    let view = <Flex as FloatTensorOps<Flex>>::float_reshape(tensor.clone(), Shape::new([4]));
    let copy = <Flex as FloatTensorOps<Flex>>::float_neg(tensor.clone());
    let buffer = |tensor| Flex::buffer(&Value::Float(tensor));
    assert_eq!(buffer(tensor.clone()), buffer(view));
    assert_ne!(buffer(tensor), buffer(copy));
}

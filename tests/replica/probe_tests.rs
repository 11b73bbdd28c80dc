//! What members see of a replica's work: which operations run on them, what those hold, and what their failures do.

use std::{
    collections::{BTreeMap, BTreeSet},
    panic::{AssertUnwindSafe, catch_unwind},
};

use bonfire::{Replica, ReplicaDevice};
use burn::{
    backend::Autodiff,
    module::AutodiffModule,
    nn::loss::CrossEntropyLossConfig,
    optim::{AdamConfig, AdamWConfig, GradientsParams, Optimizer, SgdConfig, momentum::MomentumConfig},
    tensor::{Distribution, Int, Tensor, TensorData, activation, backend::Backend},
};
use burn_flex::{Flex, FlexDevice};

use super::{
    faults::panic_of,
    models::{Classifier, Cnn, Mlp},
    probe::{Fault, Probe, ProbeDevice, assert_nothing_lives},
    runs::{ALWAYS, Run, draw_alone, floats, replica, replica_of, train},
};

type B = Replica<Probe>;
type Ad = Autodiff<B>;

#[test]
fn a_probe_computes_what_flex_computes_alone_and_as_a_member() {
    let _alone = draw_alone();
    fn assert_same(probe: Run, flex: Run, context: &str) {
        assert!(flex.losses.iter().all(|loss| loss.is_finite()));
        assert_eq!(probe, flex, "{context}");
    }
    let plain = ProbeDevice::fresh(1)[0];
    assert_same(
        train::<Autodiff<Probe>, Mlp<_>>(&plain, 7, 5),
        train::<Autodiff<Flex>, Mlp<_>>(&FlexDevice, 7, 5),
        "plain MLP",
    );
    assert_same(
        train::<Autodiff<Probe>, Cnn<_>>(&plain, 7, 5),
        train::<Autodiff<Flex>, Cnn<_>>(&FlexDevice, 7, 5),
        "plain CNN",
    );
    assert_nothing_lives(&[plain], &"plain runs");
    for num_members in 1..=3 {
        let devices = ProbeDevice::fresh(num_members);
        let probe = replica_of::<Probe>(devices.clone(), ALWAYS);
        let flex = replica::<Flex>(num_members, ALWAYS);
        assert_same(
            train::<Ad, Mlp<_>>(&probe, 7, 5),
            train::<Autodiff<Replica<Flex>>, Mlp<_>>(&flex, 7, 5),
            &format!("MLP, {num_members} members"),
        );
        assert_same(
            train::<Ad, Cnn<_>>(&probe, 7, 5),
            train::<Autodiff<Replica<Flex>>, Cnn<_>>(&flex, 7, 5),
            &format!("CNN, {num_members} members"),
        );
        // The replica itself is still there: it holds no tensor back.
        assert_nothing_lives(&devices, &format!("runs on {num_members} members"));
    }
}

#[test]
fn a_tensor_is_alive_as_long_as_a_handle_of_it() {
    let devices = ProbeDevice::fresh(2);
    let device = replica_of::<Probe>(devices.clone(), ALWAYS);
    let x = Tensor::<B, 2>::ones([8, 4], &device).matmul(floats(1, [4, 4], &device));
    let y = x.clone() * 2.0;
    B::sync(&device).unwrap();
    assert!(devices.iter().all(|device| device.num_live_tensors() > 0));
    drop((x, y));
    assert_nothing_lives(&devices, &"two tensors");
}

/// One training step, what a metric makes of its output, and operations of other kinds, all on the members; ends when
/// everything has run.
fn program(device: &ReplicaDevice<Probe>) {
    let model = Cnn::<Ad>::init(device);
    let images = floats::<Ad, 4>(3, [9, 1, 12, 12], device);
    let labels = Tensor::<Ad, 1, Int>::from_data(TensorData::from([1i64, 2, 3, 4, 5, 6, 7, 8, 9]), device);
    let logits = model.forward(images);
    let loss = CrossEntropyLossConfig::new().init(device).forward(logits.clone(), labels.clone());
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let model = AdamConfig::new().init().step(1e-3, model, grads);

    let (logits, labels) = (logits.inner(), labels.inner());
    let classes = logits.clone().argmax(1).reshape([9]);
    let right = classes.clone().equal(labels);
    let far = (classes * 3 + 1).greater_elem(12).bool_or(right.clone().bool_not());
    let masked = logits.clone().mask_fill(far.unsqueeze_dim::<2>(1).expand([9, 10]), 0.5);
    let drawn = Tensor::<B, 2>::random([9, 10], Distribution::Default, device);
    let mixed = activation::softmax(activation::gelu(masked) + drawn, 1) * activation::sigmoid(logits.clone());
    let sorted = Tensor::cat(vec![mixed.sort(1), logits], 0);

    assert!(loss.into_scalar().is_finite());
    assert!(right.int().sum().into_scalar() <= 9);
    assert!(sorted.sum().into_scalar().is_finite());
    drop(model);
    B::sync(device).unwrap();
}

/// The names of the operations of one member while `program` runs, in order.
fn operations_of(rank: usize) -> Vec<&'static str> {
    let devices = ProbeDevice::fresh(3);
    let device = replica_of::<Probe>(devices.clone(), ALWAYS);
    let recording = devices[rank].record();
    program(&device);
    let names = recording.take().into_iter().map(|record| record.name).collect();
    assert_nothing_lives(&devices, &"a program that ran");
    names
}

fn distinct_operations_of(rank: usize) -> BTreeSet<&'static str> {
    operations_of(rank).into_iter().collect()
}

/// Runs `program` on three members, of which `rank` fails as `set` says; gives the message that the caller gets.
fn message_of_failure(rank: usize, set: impl FnOnce(ProbeDevice)) -> String {
    let devices = ProbeDevice::fresh(3);
    let device = replica_of::<Probe>(devices.clone(), ALWAYS);
    set(devices[rank]);
    let message = panic_of(|| program(&device));
    // What was queued before the caller failed may fail as well.
    assert_eq!(B::sync(&device).is_err(), device.broken().is_some(), "{message}");
    match device.broken().map(|cause| cause.to_string()) {
        Some(cause) => {
            // The home device may have failed on the caller's own thread as well.
            let is_own = rank == 0 && cause.contains(&message);
            assert!(is_own || message.contains(&cause), "{message}, but the first cause is {cause}");
            assert!(cause.contains(&format!("member {rank}")), "{cause}");
        }
        // It failed there alone: then nothing is broken.
        None => {
            assert_eq!(rank, 0, "not broken after: {message}");
            devices[rank].heal();
            program(&device);
        }
    }
    drop(device);
    assert_nothing_lives(&devices, &message);
    message
}

#[test]
fn a_member_that_fails_anywhere_in_a_step_stops_the_caller_with_its_cause_and_nobody_else() {
    let _alone = draw_alone();
    let bystander = replica_of::<Probe>(ProbeDevice::fresh(2), ALWAYS);
    let kept = Tensor::<B, 2>::ones([8, 4], &bystander).matmul(Tensor::ones([4, 4], &bystander));
    for rank in 0..3 {
        let names = operations_of(rank);
        for (index, fault) in
            (0..names.len()).step_by(names.len() / 16).zip([Fault::OutOfMemory, Fault::Panic].repeat(9))
        {
            let message = message_of_failure(rank, |device| device.fail_at(index, fault));
            assert!(message.contains(fault.text()), "{message}");
            // Member 0's device is the caller's too: two threads, in no fixed order.
            let expected = if rank == 0 { &names[..] } else { &names[index..=index] };
            let named = |name: &&str| message.contains(&format!("{name} on ProbeDevice"));
            assert!(expected.iter().any(named), "{message}, where {index} is {}", names[index]);
            assert_eq!((kept.clone() * 2.0).sum().into_scalar(), 8.0 * 4.0 * 4.0 * 2.0);
        }
    }
    assert!(bystander.broken().is_none());
}

#[test]
fn every_operation_that_a_member_runs_may_fail() {
    let _alone = draw_alone();
    let names = distinct_operations_of(1);
    // Module, activation, float, int and bool operations, and what members do among themselves.
    for name in ["conv2d", "max_pool2d_with_indices", "relu", "softmax", "float_matmul", "float_sum_dim"] {
        assert!(names.contains(name), "{name} is none of {names:?}");
    }
    for name in ["float_argmax", "int_equal", "int_mul_scalar", "bool_not", "bool_into_int", "move_to", "all_reduce"] {
        assert!(names.contains(name), "{name} is none of {names:?}");
    }
    for (rank, names) in [(1, names), (0, distinct_operations_of(0))] {
        for name in names {
            let message = message_of_failure(rank, |device| device.fail_in(name, Fault::OutOfMemory));
            let is_cause = message.contains(&format!("{name} on ProbeDevice")) && message.contains("out of memory");
            assert!(is_cause, "{name}: {message}");
        }
    }
}

/// Holds a model and a tensor while a panic unwinds through it, and computes as it goes.
struct Untidy<'a> {
    device: &'a ReplicaDevice<Probe>,
    _model: Cnn<Ad>,
    loss: Tensor<Ad, 1>,
    failures: &'a mut Vec<bool>,
}

impl Drop for Untidy<'_> {
    /// What a user's own clean-up may do: read, compute, wait.
    fn drop(&mut self) {
        let failed = |work: &dyn Fn()| catch_unwind(AssertUnwindSafe(work)).is_err();
        let reads = failed(&|| drop(self.loss.clone().into_data()));
        let computes = failed(&|| drop(self.loss.clone() * 2.0));
        self.failures.extend([reads, computes, B::sync(self.device).is_err()]);
    }
}

#[test]
fn what_is_dropped_while_a_panic_unwinds_never_ends_the_process() {
    let _alone = draw_alone();
    let devices = ProbeDevice::fresh(2);
    let device = replica_of::<Probe>(devices.clone(), ALWAYS);
    let mut failures = vec![];
    let message = panic_of(|| {
        let model = Cnn::<Ad>::init(&device);
        let loss = model.forward(floats(3, [9, 1, 12, 12], &device)).mean();
        let untidy = Untidy { device: &device, _model: model, loss, failures: &mut failures };
        B::sync(&device).unwrap();
        devices[1].fail_at(3, Fault::Panic);
        let _grads = untidy.loss.backward();
        untidy.loss.clone().into_scalar();
    });
    assert!(message.contains("injected") && message.contains("member 1"), "{message}");
    assert_eq!(failures, [true; 3]);
    drop(device);
    assert_nothing_lives(&devices, &"an untidy panic");
}

#[test]
fn a_member_that_cannot_free_a_tensor_breaks_the_replica_and_nothing_else() {
    let devices = ProbeDevice::fresh(2);
    let device = replica_of::<Probe>(devices.clone(), ALWAYS);
    let x = Tensor::<B, 2>::ones([8, 4], &device).matmul(Tensor::ones([4, 4], &device));
    B::sync(&device).unwrap();
    devices[1].fail_in_drop();
    let message = panic_of(|| {
        for _ in 0..100 {
            (x.clone() * 2.0).exp().sum().into_scalar();
        }
    });
    assert!(message.contains("cannot be freed") && message.contains("member 1"), "{message}");
    assert!(device.broken().is_some() && B::sync(&device).is_err());
    drop((x, device));
    assert_nothing_lives(&devices, &"a tensor that could not be freed");
}

#[test]
fn a_draw_that_fails_on_the_home_device_breaks_nothing() {
    let _alone = draw_alone();
    let devices = ProbeDevice::fresh(2);
    let device = replica_of::<Probe>(devices.clone(), ALWAYS);
    devices[0].fail_in("float_random", Fault::OutOfMemory);
    let message = panic_of(|| program(&device));
    assert!(message.contains("float_random") && message.contains("out of memory"), "{message}");
    assert!(device.broken().is_none());
    devices[0].heal();
    program(&device);
    assert_nothing_lives(&devices, &"a failed draw and a program");
}

/// Bytes allocated by each method, in one step; what comes to a device from elsewhere is `ARRIVALS`.
type Allocations = BTreeMap<&'static str, usize>;

/// Batches and draws, which a plain device makes itself and a member is brought.
const ARRIVALS: &str = "arrivals";

/// What a member calls otherwise than a plain device: it forms a mean as a sum and a division.
fn common_name(name: &'static str) -> &'static str {
    match name {
        "float_from_data" | "int_from_data" | "float_random" | "move_to" => ARRIVALS,
        "float_mean" => "float_sum",
        "float_mean_dim" => "float_sum_dim",
        name => name,
    }
}

/// What `watched` allocates in the third training step, with everything that step enqueued.
fn allocations_of_step<I, M, O>(
    device: &I::Device,
    watched: ProbeDevice,
    batch_size: usize,
    optimizer: O,
) -> Allocations
where
    I: Backend,
    M: Classifier<Autodiff<I>> + AutodiffModule<Autodiff<I>>,
    O: Optimizer<M, Autodiff<I>>,
{
    let mut optimizer = optimizer;
    let mut model = M::init(device);
    let loss_fn = CrossEntropyLossConfig::new().init(device);
    let mut allocations = Allocations::new();
    for step in 0..3 {
        I::sync(device).unwrap();
        let recording = watched.record();
        let images = floats::<Autodiff<I>, 4>(step, [batch_size, 1, 12, 12], device);
        let labels: Vec<i64> = (0..batch_size as i64).map(|item| item % 10).collect();
        let labels = Tensor::<Autodiff<I>, 1, Int>::from_data(TensorData::from(labels.as_slice()), device);
        let loss = loss_fn.forward(model.forward(images), labels);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, grads);
        I::sync(device).unwrap();
        allocations.clear();
        for record in recording.take() {
            *allocations.entry(common_name(record.name)).or_default() += record.allocated_bytes;
        }
    }
    allocations
}

/// Of a plain device with a batch, and of the second of two members with two batches: that member has no home tensors.
fn plain_and_member<P, R>(
    plain_optimizer: impl Optimizer<P, Autodiff<Probe>>,
    optimizer: impl Optimizer<R, Ad>,
) -> (Allocations, Allocations)
where
    P: Classifier<Autodiff<Probe>> + AutodiffModule<Autodiff<Probe>>,
    R: Classifier<Ad> + AutodiffModule<Ad>,
{
    const BATCH_SIZE: usize = 8;
    let plain = ProbeDevice::fresh(1)[0];
    let members = ProbeDevice::fresh(2);
    let replica = replica_of::<Probe>(members.clone(), ALWAYS);
    (
        allocations_of_step::<Probe, P, _>(&plain, plain, BATCH_SIZE, plain_optimizer),
        allocations_of_step::<B, R, _>(&replica, members[1], 2 * BATCH_SIZE, optimizer),
    )
}

/// The methods in which a member allocates more than a plain device, as lines of a table.
fn excess((plain, member): &(Allocations, Allocations)) -> String {
    let of_plain = |method: &str| plain.get(method).copied().unwrap_or(0);
    // What is summed over the members goes back into the buffers it came in, or, where it is no plain buffer, into a copy
    // that the optimizer then need not make.
    let methods = member.iter().filter(|(method, _)| ![ARRIVALS, "all_reduce"].contains(*method));
    methods
        .filter(|&(method, &bytes)| bytes > of_plain(method))
        .map(|(method, bytes)| format!("{method}: plain {}, member {bytes}\n", of_plain(method)))
        .collect()
}

#[test]
fn no_operation_of_a_step_allocates_more_on_a_member_than_on_a_device_with_its_share_of_the_batch() {
    let _alone = draw_alone();
    let total = |allocations: &Allocations| allocations.values().sum::<usize>() as f64;
    macro_rules! compare {
        ($($model:ident $name:literal $config:expr;)*) => {$({
            let allocations = plain_and_member::<$model<_>, $model<_>>($config.init(), $config.init());
            let (plain, member) = &allocations;
            assert!(plain["float_matmul"] > 0 && plain["float_matmul"] == member["float_matmul"]);
            let excess = excess(&allocations);
            assert!(excess.is_empty(), "{} with {}:\n{excess}", stringify!($model), $name);
            // In all: a member is brought the labels twice, and the loss's first gradient, which is made at home.
            assert!(total(member) <= 1.001 * total(plain), "{} with {}", stringify!($model), $name);
        })*};
    }
    compare! {
        Mlp "SGD" SgdConfig::new();
        Mlp "momentum" SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        Mlp "Adam" AdamConfig::new();
        Mlp "AdamW" AdamWConfig::new();
        Cnn "SGD" SgdConfig::new();
        Cnn "momentum" SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
        Cnn "Adam" AdamConfig::new();
        Cnn "AdamW" AdamWConfig::new();
    }
}

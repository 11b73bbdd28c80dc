//! Shares that are not equal, and shares that change between steps: by hand, by measurement, and replayed.

use bonfire::{
    Balance, Member, Placement, Replica, ReplicaDevice, ReplicaError, ReplicaOptions, ReplicaTensor, ShareChange,
    ShareSchedule, Shares, Spread,
    collectives::{Collective, Tally},
    value::Float,
};
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module},
    nn::{
        Linear, LinearConfig, Lstm, LstmConfig, LstmState,
        loss::{CrossEntropyLossConfig, MseLoss, Reduction},
    },
    optim::{AdamConfig, GradientsAccumulator, GradientsParams, Optimizer},
    tensor::{
        ElementConversion, Int, Tensor, TensorData, TensorPrimitive,
        activation::relu,
        backend::{AutodiffBackend, Backend},
    },
};
use burn_flex::{Flex, FlexDevice};

use super::{
    models::{Classifier, Cnn, Mlp},
    probe::{Probe, ProbeDevice},
    runs::{ALWAYS, F32, assert_equal, draw_alone, floats, parameters, pseudo_random, train},
};

type Ad<M> = Autodiff<Replica<M>>;

fn members<M: Member>(devices: Vec<M::Device>, shares: Shares, balance: Balance, spread: Spread) -> ReplicaDevice<M> {
    ReplicaDevice::with_options(devices, ReplicaOptions { shares, balance, spread, ..Default::default() }).unwrap()
}

/// Equal at first.
fn balanced<M: Member>(num_members: usize, balance: Balance) -> ReplicaDevice<M> {
    members(vec![M::Device::default(); num_members], Shares::Equal, balance, ALWAYS)
}

/// Other shares after every step, for some members none.
fn restless(num_members: usize, num_steps: u64) -> ShareSchedule {
    let change = |step| {
        let weights = pseudo_random(step, num_members).into_iter().map(|x| (x.max(-0.5) * 20.0 + 10.0) as u32);
        let mut weights: Vec<u32> = weights.collect();
        weights[step as usize % num_members] += 1;
        ShareChange { step, weights }
    };
    ShareSchedule { changes: (1..num_steps).map(change).collect() }
}

fn assert_near(ours: &[f64], theirs: &[f64], tolerance: f64, context: &str) {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    assert_eq!(ours.len(), theirs.len(), "{context}");
    let distance = norm(&mut ours.iter().zip(theirs).map(|(a, b)| a - b));
    let limit = tolerance * norm(&mut theirs.iter().copied()).max(1.0);
    assert!(distance <= limit, "{context}: off by {distance:e}, allowed {limit:e}");
}

fn loss<B: AutodiffBackend, M: Classifier<B>>(
    model: &M,
    seed: u64,
    batch_size: usize,
    device: &B::Device,
) -> Tensor<B, 1> {
    let images = floats::<B, 4>(seed, [batch_size, 1, 12, 12], device);
    let labels: Vec<i64> = (0..batch_size as i64).map(|item| item % 10).collect();
    let labels = Tensor::<B, 1, Int>::from_data(TensorData::from(labels.as_slice()), device);
    CrossEntropyLossConfig::new().init(device).forward(model.forward(images), labels)
}

/// What a run leaves behind.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f64>,
    parameters: Vec<f64>,
}

/// Steps of Adam, until `goes_on` says so; a step accumulates the gradients of `num_micro_steps` batches.
fn fit<B: AutodiffBackend, M: Classifier<B> + AutodiffModule<B>>(
    device: &B::Device,
    batch_size: usize,
    num_micro_steps: u64,
    mut goes_on: impl FnMut(u64) -> bool,
) -> Trained {
    B::seed(device, 5);
    let mut model = M::init(device);
    let mut optimizer = AdamConfig::new().init::<B, M>();
    let (mut losses, mut step) = (vec![], 0);
    while goes_on(step) {
        let mut accumulator = GradientsAccumulator::new();
        for micro_step in 0..num_micro_steps {
            let loss = loss(&model, step * num_micro_steps + micro_step, batch_size, device);
            accumulator.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
            losses.push(loss.into_scalar().elem());
        }
        model = optimizer.step(1e-3, model, accumulator.grads());
        step += 1;
    }
    Trained { losses, parameters: parameters(&model) }
}

#[test]
fn a_first_member_with_a_share_of_its_own_accumulates_gradients_as_one_device_does() {
    let _alone = draw_alone();
    let plain = fit::<Autodiff<Flex>, Mlp<_>>(&FlexDevice, 9, 4, |step| step < 5);
    for num_members in 2..=4 {
        for first in [0, 1, 5, 100] {
            let devices = vec![FlexDevice; num_members];
            let device = members::<Flex>(devices, Shares::First(first), Balance::Fixed, ALWAYS);
            let context = format!("{num_members} members, {first} rows for the first");

            let y = Tensor::<Replica<Flex>, 2>::ones([9, 4], &device).matmul(Tensor::ones([4, 4], &device));
            let TensorPrimitive::Float(y) = y.into_primitive() else { panic!("not quantized") };
            let y: ReplicaTensor<Flex, Float> = y;
            let Placement::Shard { dim: 0, lengths } = y.placement() else { panic!("{context}: {}", y.placement()) };
            assert_eq!(lengths.of(0), first.min(9), "{context}");

            let before = device.collectives().tally();
            let found = fit::<Ad<Flex>, Mlp<_>>(&device, 9, 4, |step| step < 5);
            assert_near(&found.losses, &plain.losses, 1e-5, &context);
            assert_near(&found.parameters, &plain.parameters, 1e-4, &context);
            // Gradients are summed once per step, losses as they are read.
            let tally = device.collectives().tally() - before;
            assert_eq!(tally.num_calls(Collective::AllReduce), 5 * (4 + 1), "{context}: {tally}");
            assert_eq!(tally.total_calls(), tally.num_calls(Collective::AllReduce), "{context}: {tally}");
        }
    }
}

#[test]
fn shares_that_change_after_every_step_leave_training_as_it_is() {
    let _alone = draw_alone();
    let mlp = train::<Autodiff<Flex>, Mlp<_>>(&FlexDevice, 11, 7);
    let cnn = train::<Autodiff<Flex>, Cnn<_>>(&FlexDevice, 11, 7);
    for num_members in 1..=4 {
        for spread in [ALWAYS, Spread::Eager] {
            let device = || {
                let balance = Balance::Replay(restless(num_members, 30));
                members::<Flex>(vec![FlexDevice; num_members], Shares::Equal, balance, spread)
            };
            let context = format!("{num_members} members, {spread:?}");
            assert_equal(&train::<Ad<Flex>, Mlp<_>>(&device(), 11, 7), &mlp, F32, &context);
            let run = || train::<Ad<Flex>, Cnn<_>>(&device(), 11, 7);
            let found = run();
            assert_equal(&found, &cnn, F32, &context);
            assert_eq!(run(), found, "{context}: two runs");
        }
    }
}

#[derive(Module, Debug)]
struct Stateful<B: Backend> {
    lstm: Lstm<B>,
    output: Linear<B>,
}

impl<B: Backend> Stateful<B> {
    fn forward(&self, x: Tensor<B, 3>, state: Option<LstmState<B, 2>>) -> (Tensor<B, 3>, LstmState<B, 2>) {
        let (x, state) = self.lstm.forward(x, state);
        (self.output.forward(x), state)
    }
}

/// The state of an LSTM goes from step to step, and a batch to validate with is the same in each.
fn train_stateful<B: AutodiffBackend>(device: &B::Device) -> Trained {
    B::seed(device, 3);
    let mut model =
        Stateful { lstm: LstmConfig::new(3, 8, true).init(device), output: LinearConfig::new(8, 3).init::<B>(device) };
    let mut optimizer = AdamConfig::new().init();
    let validation = floats::<B::InnerBackend, 3>(99, [6, 4, 3], device);
    let (mut losses, mut state) = (vec![], None);
    for step in 0..20 {
        let x = floats::<B, 3>(step, [7, 5, 3], device);
        let (prediction, next) = model.forward(x.clone(), state);
        let loss = MseLoss::new().forward(prediction, x, Reduction::Mean);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
        state = Some(LstmState::new(next.cell.detach(), next.hidden.detach()));
        losses.push(loss.into_scalar().elem());
        let valid = model.valid();
        losses.push(valid.forward(validation.clone(), None).0.abs().mean().into_scalar().elem());
    }
    let state = state.expect("there were steps");
    let mut parameters = parameters(&model);
    parameters.extend(state.hidden.into_data().iter::<f64>());
    Trained { losses, parameters }
}

#[test]
fn what_is_alive_when_shares_change_stays_right() {
    let _alone = draw_alone();
    let plain = train_stateful::<Autodiff<Flex>>(&FlexDevice);
    for num_members in 1..=4 {
        let run = || train_stateful::<Ad<Flex>>(&balanced(num_members, Balance::Replay(restless(num_members, 20))));
        let found = run();
        assert_near(&found.losses, &plain.losses, 1e-5, &format!("losses on {num_members} members"));
        assert_near(&found.parameters, &plain.parameters, 1e-4, &format!("parameters on {num_members} members"));
        assert_eq!(run(), found, "two runs on {num_members} members");
    }
}

/// Each change needs a tensor that stays alive in other lengths.
#[test]
fn a_batch_that_is_trained_on_for_long_does_not_pile_up_in_the_shares_of_each_step() {
    type B = Replica<Probe>;
    let devices = ProbeDevice::fresh(2);
    let change = |step: u64| ShareChange { step, weights: vec![step as u32, 60 - step as u32] };
    let schedule = ShareSchedule { changes: (1..60).map(change).collect() };
    let device = members::<Probe>(devices.clone(), Shares::Equal, Balance::Replay(schedule), ALWAYS);
    let x = floats::<Autodiff<B>, 2>(1, [60, 8], &device);
    let weight = floats::<Autodiff<B>, 2>(2, [8, 4], &device).require_grad();
    let mut num_live = vec![];
    let mut sums = vec![];
    for _ in 1..60 {
        let grads = x.clone().matmul(weight.clone()).square().mean().backward();
        // Subtracted from a whole value, as an optimizer does, which is what ends a step.
        sums.push((weight.clone().inner() - weight.grad(&grads).unwrap()).sum().into_scalar());
        drop(grads);
        B::sync(&device).unwrap();
        num_live.push(devices[1].num_live_tensors());
    }
    assert_eq!(device.shares(), Shares::Weighted(vec![59, 1]));
    assert!(num_live[50] <= num_live[10], "{num_live:?}");
    assert_near(&sums.iter().map(|&x| x as f64).collect::<Vec<_>>(), &[sums[0] as f64; 59], 1e-5, "gradients");
}

/// Member 1's part of a batch.
fn part_of_second<M: Member>(device: &ReplicaDevice<M>) -> f64 {
    let Shares::Weighted(weights) = device.shares() else { panic!("shares of `auto` are weights") };
    f64::from(weights[1]) / f64::from(weights.iter().sum::<u32>())
}

/// Wide enough that its products take most of a step's time, on a busy machine too.
#[derive(Module, Debug)]
struct Wide<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Classifier<B> for Wide<B> {
    fn init(device: &B::Device) -> Self {
        Self { hidden: LinearConfig::new(144, 1024).init(device), output: LinearConfig::new(1024, 10).init(device) }
    }

    fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        self.output.forward(relu(self.hidden.forward(images.flatten(1, 3))))
    }
}

/// No time is asserted: a member of a quarter of the speed is told apart on a busy machine too.
#[test]
fn auto_takes_rows_from_a_slow_member_gives_them_back_and_is_replayed_bitwise() {
    let _alone = draw_alone();
    let devices = ProbeDevice::fresh(2);
    let device = members::<Probe>(devices.clone(), Shares::Equal, Balance::Auto, ALWAYS);
    devices[1].slow_down(4.0);
    let (mut parts, mut slow_until) = (vec![], None);
    let found = fit::<Ad<Probe>, Wide<_>>(&device, 256, 1, |step| {
        let part = part_of_second(&device);
        parts.push(part);
        if slow_until.is_none() && part < 0.4 {
            slow_until = Some(step);
            devices[1].slow_down(1.0);
        }
        let has_recovered = slow_until.is_some() && part > 0.4;
        step < 300 && !has_recovered
    });
    let num_steps = parts.len() as u64 - 1;
    assert_eq!(parts[0], 0.5);
    assert!(slow_until.is_some_and(|step| step < num_steps), "member 1 never got less: {parts:?}");
    assert!(parts.last().is_some_and(|&part| part > 0.4), "member 1 never got its part back: {parts:?}");

    let schedule = device.share_schedule().unwrap();
    assert!(schedule.changes.len() >= 3, "{schedule:?}");
    let written = serde_json::to_string(&schedule).unwrap();
    let replayed = Balance::Replay(serde_json::from_str(&written).unwrap());
    let again = members::<Probe>(ProbeDevice::fresh(2), Shares::Equal, replayed, ALWAYS);
    assert_eq!(fit::<Ad<Probe>, Wide<_>>(&again, 256, 1, |step| step < num_steps), found);
    assert_eq!(again.share_schedule(), Some(schedule));

    // With any other split the losses are those of one device as well.
    let plain = fit::<Autodiff<Flex>, Wide<_>>(&FlexDevice, 256, 1, |step| step < num_steps);
    assert_near(&found.losses[..10], &plain.losses[..10], 1e-5, "first losses");
    assert_near(&found.losses, &plain.losses, 1e-3, "losses");
}

#[test]
fn auto_leaves_shares_alone_where_there_is_nothing_to_share_or_to_learn() {
    let _alone = draw_alone();
    let untouched = |device: &ReplicaDevice<Flex>| {
        let weights = vec![1; device.num_members()];
        assert_eq!(device.share_schedule().unwrap().changes, [ShareChange { step: 0, weights }]);
    };
    // One member has all rows; of three rows four members have one each, or none.
    for (num_members, batch_size) in [(1, 16), (4, 3)] {
        let plain = fit::<Autodiff<Flex>, Mlp<_>>(&FlexDevice, batch_size, 1, |step| step < 40);
        let device = balanced::<Flex>(num_members, Balance::Auto);
        let found = fit::<Ad<Flex>, Mlp<_>>(&device, batch_size, 1, |step| step < 40);
        assert_near(&found.losses, &plain.losses, 1e-3, &format!("{num_members} members, batch {batch_size}"));
        untouched(&device);
    }
    // No gradients: no steps.
    let devices = ProbeDevice::fresh(2);
    devices[1].slow_down(5.0);
    let device = members::<Probe>(devices, Shares::Equal, Balance::Auto, ALWAYS);
    let model = Mlp::<Replica<Probe>>::init(&device);
    for step in 0..40 {
        let images = floats::<Replica<Probe>, 4>(step, [64, 1, 12, 12], &device);
        assert!(model.forward(images).mean().into_scalar().is_finite());
    }
    assert_eq!(device.share_schedule().unwrap().changes.len(), 1);
    assert_eq!(device.shares(), Shares::Weighted(vec![1, 1]));
}

/// The collectives of each step.
fn tallies<M: Classifier<Ad<Flex>> + AutodiffModule<Ad<Flex>>>(balance: Balance) -> Vec<Tally> {
    let device = balanced::<Flex>(3, balance);
    let (mut tallies, mut before) = (vec![], device.collectives().tally());
    fit::<Ad<Flex>, M>(&device, 9, 2, |step| {
        <Replica<Flex> as Backend>::sync(&device).unwrap();
        let now = device.collectives().tally();
        tallies.push(now - before);
        before = now;
        step < 24
    });
    tallies
}

#[test]
fn steps_take_the_same_collectives_whether_shares_are_measured_change_or_stay() {
    fn same<M: Classifier<Ad<Flex>> + AutodiffModule<Ad<Flex>>>() {
        let fixed = tallies::<M>(Balance::Fixed);
        assert!(fixed[3].num_calls(Collective::AllReduce) >= 3);
        assert_eq!(tallies::<M>(Balance::Auto), fixed);
        assert_eq!(tallies::<M>(Balance::Replay(restless(3, 24))), fixed);
    }
    let _alone = draw_alone();
    same::<Mlp<_>>();
    same::<Cnn<_>>();
}

#[test]
fn steps_are_counted_by_gradients_that_are_summed_for_an_operation_on_whole_values() {
    let _alone = draw_alone();
    // Of two windows of three batches, each is one step: the second one has the shares of the change after step 1.
    let schedule = |step| ShareSchedule { changes: vec![ShareChange { step, weights: vec![1, 3] }] };
    for (step, expected) in [(2, Shares::Weighted(vec![1, 3])), (3, Shares::Equal)] {
        let device = balanced::<Flex>(2, Balance::Replay(schedule(step)));
        fit::<Ad<Flex>, Cnn<_>>(&device, 8, 3, |step| step < 2);
        assert_eq!(device.shares(), expected);
    }
}

#[test]
fn schedules_and_starts_that_cannot_work_are_errors() {
    let make = |shares, balance| {
        let options = ReplicaOptions { shares, balance, ..Default::default() };
        ReplicaDevice::<Flex>::with_options([FlexDevice, FlexDevice], options)
    };
    for (changes, reason) in [
        (vec![(0, vec![1, 1]), (4, vec![1, 2, 3])], "from step 4 on: 3 weights for 2 ranks"),
        (vec![(3, vec![1, 2]), (3, vec![2, 1])], "step 3, listed after step 3"),
        (vec![(1, vec![0, 0])], "from step 1 on: the weights of all 2 ranks are 0"),
    ] {
        let changes = changes.into_iter().map(|(step, weights)| ShareChange { step, weights }).collect();
        let error = make(Shares::Equal, Balance::Replay(ShareSchedule { changes })).unwrap_err();
        assert!(matches!(error, ReplicaError::Shares { num_members: 2, .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    for shares in [Shares::First(3), Shares::Weighted(vec![0, 1])] {
        let error = make(shares, Balance::Auto).unwrap_err().to_string();
        assert!(error.contains("equal, or weights above zero"), "{error}");
    }
    let device = make(Shares::Weighted(vec![1, 2]), Balance::Auto).unwrap();
    assert_eq!(device.share_schedule().unwrap().weights_after(0), Some(&[1, 2][..]));
    assert_eq!(make(Shares::Equal, Balance::Fixed).unwrap().share_schedule(), None);
}

#[test]
fn a_balance_is_read_from_a_file() {
    let read = |text: &str| serde_json::from_str::<ReplicaOptions>(text);
    assert_eq!(read(r#"{"balance": "Auto"}"#).unwrap().balance, Balance::Auto);
    let options = read(r#"{"balance": {"Replay": {"changes": [{"step": 3, "weights": [1, 2]}]}}}"#).unwrap();
    let schedule = ShareSchedule { changes: vec![ShareChange { step: 3, weights: vec![1, 2] }] };
    assert_eq!(options.balance, Balance::Replay(schedule));
    assert_eq!(read(&serde_json::to_string(&options).unwrap()).unwrap(), options);
    let misspelt = read(r#"{"balance": {"Replay": {"changes": [{"step": 3, "weight": [1, 2]}]}}}"#);
    assert!(misspelt.is_err(), "a misspelt field is not ignored");
}

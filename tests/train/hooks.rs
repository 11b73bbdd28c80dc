//! Gradients that are handed over while backward runs.

use std::sync::{Arc, Mutex};

use bonfire::train::{AnyHooks, GradientSink, HookBackend, HookReport, Hooks};
use bonfire_tests::images::ResNet;
use burn::{
    backend::{Autodiff, autodiff::checkpoint::strategy::BalancedCheckpointing},
    module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId, list_param_ids},
    nn::{Linear, LinearConfig},
    optim::{GradientsAccumulator, GradientsParams, Optimizer, SgdConfig},
    tensor::{
        Distribution, Tensor, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
        ops::{FloatTensor, FloatTensorOps},
        try_read_sync,
    },
};
use burn_flex::Flex;

use crate::models::filled;

type B = Autodiff<Flex>;

/// Keeps the gradients, and says in the log when they came.
#[derive(Default)]
struct Collected {
    gradients: Mutex<Vec<(ParamId, FloatTensor<Flex>)>>,
    log: Arc<Mutex<Vec<String>>>,
}

impl GradientSink<Flex> for Collected {
    fn ready(&self, id: ParamId, gradient: FloatTensor<Flex>) {
        self.log.lock().unwrap().push(id.to_string());
        self.gradients.lock().unwrap().push((id, gradient));
    }
}

/// Layers that may be left out or used twice.
#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    layers: Vec<Linear<B>>,
}

impl<B: Backend> Mlp<B> {
    fn new(num_layers: usize) -> Self {
        let device = Default::default();
        Self { layers: (0..num_layers).map(|_| LinearConfig::new(4, 4).init(&device)).collect() }
    }

    fn loss(&self, order: &[usize], input: Tensor<B, 2>) -> Tensor<B, 1> {
        order.iter().fold(input, |x, &layer| self.layers[layer].forward(x).tanh()).powi_scalar(2).mean()
    }
}

/// The bits of each gradient, or none, in the model's order.
struct Bits<'a>(&'a GradientsParams, Vec<(ParamId, Option<Vec<u8>>)>);

impl<A: AutodiffBackend> ModuleVisitor<A> for Bits<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<A, D>>) {
        let gradient = self.0.get::<A::InnerBackend, D>(param.id);
        self.1.push((param.id, gradient.map(|gradient| gradient.into_data().as_bytes().to_vec())));
    }
}

fn bits<A: AutodiffBackend>(
    model: &impl AutodiffModule<A>,
    gradients: &GradientsParams,
) -> Vec<(ParamId, Option<Vec<u8>>)> {
    let mut bits = Bits(gradients, Vec::new());
    model.visit(&mut bits);
    bits.1
}

/// The gradients of a step on a hooked copy, those handed over, and what the hooks say about it.
fn hooked_step<A, M>(model: &M, step: impl Fn(&M) -> GradientsParams) -> (GradientsParams, Arc<Collected>, HookReport)
where
    A: HookBackend<InnerBackend = Flex>,
    M: AutodiffModule<A>,
{
    let sink = Arc::new(Collected::default());
    let hooked = Hooks::<A>::new().hook(model, sink.clone());
    let gradients = step(&hooked.model);
    let report = hooked.finish(&gradients);
    (gradients, sink, report)
}

/// Checks that hooks change no bit, whatever way a gradient comes.
fn assert_same<A, M>(model: &M, step: impl Fn(&M) -> GradientsParams) -> HookReport
where
    A: HookBackend<InnerBackend = Flex>,
    M: AutodiffModule<A>,
{
    let plain = bits(model, &step(model));
    let (given, sink, report) = hooked_step::<A, M>(model, step);
    assert_eq!(bits(model, &given), plain, "the step's gradients");
    assert!(report.holds(), "{report:?}");
    let handed = sink.gradients.lock().unwrap();
    assert_eq!(handed.iter().map(|(id, _)| *id).collect::<Vec<_>>(), report.fired);
    for (id, gradient) in handed.iter() {
        let data = Flex::float_into_data(gradient.clone());
        let expected = plain.iter().find(|(other, _)| other == id).unwrap().1.as_deref();
        assert_eq!(Some(try_read_sync(data).unwrap().unwrap().as_bytes()), expected, "gradient handed over");
    }
    report
}

/// The same values each time, whoever draws meanwhile.
fn input<A: Backend>(seed: u32) -> Tensor<A, 2> {
    let values: Vec<f32> = (0..32u32).map(|index| (index * 7 + seed * 13) as f32).map(f32::sin).collect();
    Tensor::<A, 1>::from_floats(values.as_slice(), &Default::default()).reshape([8, 4])
}

#[test]
fn hooks_hand_over_the_gradients_of_an_mlp_bit_for_bit() {
    let model = Mlp::<B>::new(3);
    let report = assert_same::<B, _>(&model, |model| {
        GradientsParams::from_grads(model.loss(&[0, 1, 2], input::<B>(1)).backward(), model)
    });
    assert_eq!((report.fired.len(), report.missing.len()), (6, 0));
}

#[test]
fn hooks_hand_over_the_gradients_of_a_cnn_with_batch_norm_bit_for_bit() {
    let device = Default::default();
    let model = ResNet::<B>::new([4, 4, 8, 8], &device);
    let images = Tensor::<B, 4>::random([4, 3, 8, 8], Distribution::Default, &device);
    let report = assert_same::<B, _>(&model, |model| {
        GradientsParams::from_grads(model.forward(images.clone()).powi_scalar(2).mean().backward(), model)
    });
    assert!(report.missing.is_empty());
}

#[test]
fn hooks_hand_over_the_gradients_of_a_model_that_recomputes_activations() {
    type Saving = Autodiff<Flex, BalancedCheckpointing>;
    let model = Mlp::<Saving>::new(3);
    let report = assert_same::<Saving, _>(&model, |model| {
        GradientsParams::from_grads(model.loss(&[0, 1, 2], input(1)).backward(), model)
    });
    assert_eq!(report.fired.len(), 6);
}

#[test]
fn a_shared_weight_is_handed_over_once_with_the_sum_of_its_uses() {
    let model = Mlp::<B>::new(2);
    let report = assert_same::<B, _>(&model, |model| {
        GradientsParams::from_grads(model.loss(&[0, 1, 0, 0], input::<B>(2)).backward(), model)
    });
    assert_eq!(report.fired.len(), 4);
}

#[test]
fn a_parameter_that_sits_in_two_places_is_handed_over_once() {
    let mut model = Mlp::<B>::new(2);
    model.layers[1].weight = model.layers[0].weight.clone();
    let report = assert_same::<B, _>(&model, |model| {
        GradientsParams::from_grads(model.loss(&[0, 1], input::<B>(2)).backward(), model)
    });
    assert_eq!(report.fired.len(), 3);
}

#[test]
fn a_parameter_that_backward_does_not_come_to_is_listed_as_missing() {
    let model = Mlp::<B>::new(3);
    let report = assert_same::<B, _>(&model, |model| {
        GradientsParams::from_grads(model.loss(&[0, 2], input::<B>(3)).backward(), model)
    });
    assert_eq!(report.missing, list_param_ids(&model.layers[1]));
    assert_eq!(report.fired.len(), 4);
}

#[test]
fn frozen_parameters_have_no_hook() {
    let mut model = Mlp::<B>::new(2);
    model.layers[0] = model.layers[0].clone().no_grad();
    let report = assert_same::<B, _>(&model, |model| {
        GradientsParams::from_grads(model.loss(&[0, 1], input::<B>(3)).backward(), model)
    });
    assert_eq!((report.fired.len(), report.missing.len()), (2, 0));
}

#[test]
fn a_gradient_of_nan_is_the_one_that_was_handed_over() {
    let model = Mlp::<B>::new(1);
    let (_, _, report) = hooked_step::<B, _>(&model, |model| {
        let loss = model.loss(&[0], input::<B>(3)) * f32::NAN;
        GradientsParams::from_grads(loss.backward(), model)
    });
    assert!(report.holds());
}

#[test]
fn the_last_layers_come_first_and_before_backward_is_over() {
    let model = Mlp::<B>::new(3);
    let sink = Collected::default();
    let log = sink.log.clone();
    let hooked = Hooks::<B>::new().hook(&model, Arc::new(sink));
    let mut x = input::<B>(4);
    for (index, layer) in hooked.model.layers.iter().enumerate() {
        x = layer.forward(x).tanh();
        let TensorPrimitive::Float(primitive) = x.into_primitive() else { unreachable!("float tensors") };
        let log = log.clone();
        let passed = move |gradient| {
            log.lock().unwrap().push(format!("through layer {index}"));
            gradient
        };
        let output = B::inner(primitive.clone());
        x = Tensor::from_primitive(TensorPrimitive::Float(B::function(primitive, output, Arc::new(passed))));
    }
    let gradients = GradientsParams::from_grads(x.mean().backward(), &hooked.model);
    assert!(hooked.finish(&gradients).holds());
    let log = log.lock().unwrap();
    let at = |what: &str| log.iter().position(|entry| entry == what).unwrap();
    for index in 0..3 {
        for id in list_param_ids(&model.layers[index]) {
            let fired = at(&id.to_string());
            assert!(fired > at(&format!("through layer {index}")), "{log:?}");
            assert!(index == 0 || fired < at(&format!("through layer {}", index - 1)), "{log:?}");
        }
    }
}

#[test]
fn a_step_with_several_backward_passes_is_found_out_and_keeps_its_gradients() {
    let model = Mlp::<B>::new(2);
    let twice = |model: &Mlp<B>| {
        let first = GradientsParams::from_grads(model.loss(&[0, 1], input::<B>(5)).backward(), model);
        let second = GradientsParams::from_grads(model.loss(&[0], input::<B>(6)).backward(), model);
        let mut sums = GradientsAccumulator::new();
        sums.accumulate(model, first);
        sums.accumulate(model, second);
        sums.grads()
    };
    let plain = bits(&model, &twice(&model));
    let (given, _, report) = hooked_step::<B, _>(&model, twice);
    assert_eq!(bits(&model, &given), plain);
    assert_eq!(report.changed, list_param_ids(&model.layers[0]));
    assert_eq!(report.fired.len(), 4);
}

#[test]
fn a_step_that_drops_or_scales_gradients_is_found_out() {
    let model = Mlp::<B>::new(2);
    let dropped = |model: &Mlp<B>| {
        let mut gradients = model.loss(&[0, 1], input::<B>(5)).backward();
        GradientsParams::from_module(&mut gradients, &model.layers[1])
    };
    let (_, _, report) = hooked_step::<B, _>(&model, dropped);
    assert_eq!(report.changed, list_param_ids(&model.layers[0]));
    let scaled = |model: &Mlp<B>| {
        let mut gradients = GradientsParams::from_grads(model.loss(&[0, 1], input::<B>(5)).backward(), model);
        let id = model.layers[0].weight.id;
        let gradient = gradients.remove::<Flex, 2>(id).unwrap();
        gradients.register(id, gradient * 0.5);
        gradients
    };
    let (_, _, report) = hooked_step::<B, _>(&model, scaled);
    assert_eq!(report.changed, [model.layers[0].weight.id]);
}

#[test]
fn two_backward_passes_over_different_parameters_are_one_step() {
    let model = Mlp::<B>::new(2);
    let apart = |model: &Mlp<B>| {
        let mut first = model.loss(&[0], input::<B>(5)).backward();
        let mut second = model.loss(&[1], input::<B>(6)).backward();
        let mut sums = GradientsAccumulator::new();
        sums.accumulate(model, GradientsParams::from_module(&mut first, model));
        sums.accumulate(model, GradientsParams::from_module(&mut second, model));
        sums.grads()
    };
    let report = assert_same::<B, _>(&model, apart);
    assert_eq!(report.fired.len(), 4);
}

#[test]
fn a_hook_that_fires_after_its_step_is_ignored() {
    let model = Mlp::<B>::new(1);
    let sink = Arc::new(Collected::default());
    let hooked = Hooks::<B>::new().hook(&model, sink.clone());
    let loss = hooked.model.loss(&[0], input::<B>(7));
    let report = hooked.finish(&GradientsParams::new());
    loss.backward();
    assert_eq!((report.fired.len(), report.missing.len()), (0, 2));
    assert!(sink.gradients.lock().unwrap().is_empty());
}

/// CASES 47
#[test]
fn three_hundred_hooked_steps_on_four_threads_equal_those_on_one() {
    let train = || {
        let mut model = filled(Mlp::new(2));
        let mut optimizer = SgdConfig::new().init::<B, Mlp<B>>();
        for step in 0..300 {
            let hooked = Hooks::<B>::new().hook(&model, Arc::new(Collected::default()));
            let data: Vec<f32> = (0..32).map(|index| ((index + step) % 7) as f32 / 7.0).collect();
            let x = Tensor::<B, 1>::from_floats(data.as_slice(), &Default::default()).reshape([8, 4]);
            let gradients = GradientsParams::from_grads(hooked.model.loss(&[0, 1], x).backward(), &hooked.model);
            let report = hooked.finish(&gradients);
            assert!(report.holds() && report.fired.len() == 4, "{report:?}");
            model = optimizer.step(0.1, model, gradients);
        }
        weights(&model)
    };
    let alone = train();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(train)).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), alone);
        }
    });
}

fn weights(model: &Mlp<B>) -> Vec<Vec<u8>> {
    model.layers.iter().map(|layer| layer.weight.val().into_data().as_bytes().to_vec()).collect()
}

#[test]
fn hooks_without_a_name_fit_only_the_backend_that_they_were_made_for() {
    let hooks = AnyHooks::of::<B>();
    assert!(hooks.get::<B>().is_some());
    assert!(hooks.get::<Autodiff<Flex, BalancedCheckpointing>>().is_none());
}

//! What a decision costs; run by hand: `cargo test --release -p vnplug-switch --lib -- --ignored --nocapture
//! of_a_decision`.

use std::time::Instant;

use super::*;

#[test]
#[ignore = "a measurement"]
fn of_a_decision() {
    for text in [
        "",
        "isolated=yes",
        "vlan=10",
        "trunk=1-100 native=1 storm=no",
    ] {
        let mut settings = PortSettings::default();
        settings.apply(text).unwrap();
        for ports in [10_u16, 4000] {
            for pairs in [1_u16, 64] {
                let best = best(&settings, text, ports, pairs);
                println!("{ports} ports, {pairs} pairs, {text:?}: {best:.2} ns a frame");
            }
        }
    }
}

fn best(settings: &PortSettings, text: &str, ports: u16, pairs: u16) -> f64 {
    let mut it = Forwarder::new(Limits::default());
    (1..=ports).for_each(|port| it.add(port));
    if !text.is_empty() {
        // Another port's rules are enough to go the long way.
        it.set(1, settings, 0);
        if !settings.is_isolated {
            it.set(2, settings, 0);
        }
    }
    let mut frames = Vec::new();
    for pair in 0..pairs {
        let mut there = [0; 60];
        let [a, b] = pair.to_be_bytes();
        there[..12].copy_from_slice(&[2, 0, 0, 1, a, b, 2, 0, 0, 2, a, b]);
        let mut back = there;
        back[..6].copy_from_slice(&there[6..12]);
        back[6..12].copy_from_slice(&there[..6]);
        frames.extend([(1, there), (2, back)]);
    }
    let mut best = f64::MAX;
    for _ in 0..15 {
        let began = Instant::now();
        let mut total = 0;
        for round in 0..10_000 {
            it.begin(1_000_000);
            for nth in 0..128 {
                let (from, frame) = &frames[(round * 128 + nth) % frames.len()];
                let frame = std::hint::black_box(frame);
                let way = std::hint::black_box(it.decide(*from, (frame, frame.len()), None));
                total += way.count();
            }
        }
        assert!(total > 0);
        best = best.min(began.elapsed().as_nanos() as f64 / 1_280_000.0);
    }
    best
}

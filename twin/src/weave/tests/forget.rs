//! A hash that forgets: which key, and how many.

use super::*;

#[test]
fn a_full_bucket_forgets_the_key_that_was_used_the_longest_time_ago() {
    let seed = vnplug_frame::witness::seed("forget");
    let mut dice = Dice(seed);
    let kind = MapKind::Hash {
        key_bytes: 8,
        forgets: true,
    };
    // One bucket.
    let spec = spec(kind, 8, 8);
    let layout = Layout::of(&spec, 8, true);
    assert_eq!(layout.slots(), 16);
    let array = Array::create("tested", layout.bucket(), layout.array() as u32, false).unwrap();
    let seats = Arc::default();
    // What is found is made more by two.
    let acts = [Act::Look(0, 2), Act::Put(0, 0, 500), Act::Remove(0)];
    let mut instances = acts.map(|act| both(&[act], (&spec, &array), 8, &seats));
    // Keys and their values; the one that was used last is at the end.
    let mut model: Vec<(u64, u64)> = Vec::new();
    let mut forgotten = 0;
    for number in 0..60_000 {
        let (key, act) = (
            dice.below(24),
            [0, 0, 0, 1, 1, 1, 2][dice.below(7) as usize],
        );
        let mut frame = vec![0; 80];
        frame[..8].copy_from_slice(&key.to_ne_bytes());
        let at = model.iter().position(|it| it.0 == key);
        let there = at.map(|at| model.remove(at));
        let result = match (act, there) {
            (0, None) => 0,
            (0, Some((_, value))) => {
                model.push((key, value + 2));
                value
            }
            (1, _) => {
                if model.len() == 16 {
                    model.remove(0);
                    forgotten += 1;
                }
                model.push((key, 500));
                0
            }
            (_, None) => 2_u64.wrapping_neg(),
            (_, Some(_)) => 0,
        };
        let wanted = 31_u64.wrapping_add(result);
        let wanted = (wanted >> 32) as u32 ^ wanted as u32;
        let (kernel, daemon) = &mut instances[act];
        let ours = match dice.below(2) {
            0 => kernel.test(&frame).unwrap(),
            _ => daemon
                .run(&frame, &Meta::default())
                .verdict
                .unwrap()
                .cast_unsigned(),
        };
        assert_eq!(
            ours, wanted,
            "seed {seed}, frame {number}, key {key}, {act}"
        );
    }
    assert!(forgotten > 1_000, "{forgotten}");
}

#[test]
fn as_many_keys_as_may_be_are_there_but_for_one_of_a_thousand() {
    const ENTRIES: u32 = 1 << 13;
    let kind = MapKind::Hash {
        key_bytes: 8,
        forgets: true,
    };
    let spec = spec(kind, 8, ENTRIES);
    let layout = Layout::of(&spec, 8, true);
    let array = Array::create("tested", layout.bucket(), layout.array() as u32, false).unwrap();
    let seats = Arc::default();
    let [mut put, mut look] =
        [Act::Put(0, 0, 1), Act::Look(0, 0)].map(|act| both(&[act], (&spec, &array), 8, &seats).1);
    let run = |of: &mut Instance, key: u64| {
        let mut frame = vec![0; 80];
        frame[..8].copy_from_slice(&key.to_ne_bytes());
        of.run(&frame, &Meta::default()).verdict
    };
    for key in 0..u64::from(ENTRIES) {
        assert_eq!(run(&mut put, key), Some(31));
    }
    let found = (0..u64::from(ENTRIES)).filter(|&key| run(&mut look, key) == Some(32));
    let found = found.count();
    println!("{found} of {ENTRIES}");
    assert!(found >= ENTRIES as usize * 995 / 1000, "{found}");
}

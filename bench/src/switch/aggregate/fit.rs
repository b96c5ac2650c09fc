//! The curve of Menon's figure 3.9: a part that every frame costs, and a part that is shared by the segments of one.

/// `x + y / k`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Fit {
    /// What does not become less.
    pub(super) x: f64,
    /// What `k` segments share.
    pub(super) y: f64,
    /// Root of the mean square of what is between curve and points, as a share of the mean point.
    pub(super) error: f64,
}

/// The curve with the least squares, of points `(k, cost)` that are not all at one `k`.
pub(super) fn fit(points: &[(usize, f64)]) -> Fit {
    let count = points.len() as f64;
    let mean = |of: &dyn Fn(&(usize, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let share = |k: usize| 1.0 / k as f64;
    let (at, cost) = (mean(&|it| share(it.0)), mean(&|it| it.1));
    let both = mean(&|it| (share(it.0) - at) * (it.1 - cost));
    let y = both / mean(&|it| (share(it.0) - at).powi(2));
    let x = cost - y * at;
    let square = mean(&|it| (x + y * share(it.0) - it.1).powi(2));
    Fit {
        x,
        y,
        error: square.sqrt() / cost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_found_through_its_points_and_beside_others() {
        let points = [1, 2, 4, 20, 44].map(|k| (k, 1.5 + 2.0 / k as f64));
        let found = fit(&points);
        assert!((found.x - 1.5).abs() < 1e-9 && (found.y - 2.0).abs() < 1e-9);
        assert!(found.error < 1e-9);
        let flat = fit(&[(1, 2.0), (2, 1.0), (44, 2.0)]);
        assert!(flat.error > 0.1, "{flat:?}");
    }
}

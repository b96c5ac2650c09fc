// Who is logged in, by what every answer says; whoever is not (any more) goes to where one logs in.

const place = document.getElementById('user');

/** Looks at an answer, and gives it back. */
export function known(response) {
  if (response.status === 401) location.assign('login.html');
  const name = response.headers.get('vnplug-user');
  if (name !== null && place.hidden) {
    place.hidden = false;
    place.querySelector('span').textContent = name;
    place.querySelector('button').onclick = async () => {
      await fetch('logout', { method: 'POST' });
      location.assign('login.html');
    };
  }
  return response;
}

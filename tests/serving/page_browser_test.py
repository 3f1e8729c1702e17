"""The page in a browser, with a server as people run it: what is shown is what the API answers."""

import asyncio
import contextlib
import json

import browser
import made_run
import pytest
import serving

from dipaco_jax.storage import publishing

pytestmark = pytest.mark.slow

TEMPLATE = '{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant:'
PROMPT = 'The quick brown fox jumps over the lazy dog'
DONE = 'controller === null'
ENTER, TAB, ESCAPE = ('Enter', 13), ('Tab', 9), ('Escape', 27)


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  if not browser.CHROMIUM:
    pytest.skip('Chromium is not installed: no chromium')
  folder = tmp_path_factory.mktemp('page')
  made_run.write(folder / 'run', made_run.settings(model={'seq_len': 1024}))
  publishing.write_sealed(folder / 'run' / 'chat_template.jinja', TEMPLATE.encode())
  made = serving.Serving(folder / 'run', folder / 'log')
  try:
    made.wait()
    yield made
  finally:
    made.process.kill()
    made.process.communicate()


@contextlib.asynccontextmanager
async def page(server, folder, width: int = 1280):
  """The page behind the form for the key; the end asserts that the page has reported nothing."""
  async with browser.opened(folder) as tab:
    await tab.show(width)
    await tab.open(f'http://127.0.0.1:{server.port}/')
    await tab.wait_for("document.activeElement.id == 'key-value'")
    (refused,) = tab.problems
    assert refused.startswith('network: ') and '401' in refused
    tab.problems.clear()
    await tab.type(serving.KEY)
    await tab.press(*ENTER)
    await tab.wait_for("document.activeElement.id == 'text'")
    yield tab
    assert tab.problems == []


async def send(tab, prompt: str = PROMPT, **values):
  """Fills in the form, without waiting for an answer."""
  numbers = "$('ask').elements[name] ?? $(name)"
  await tab.run(f'for (const [name, value] of Object.entries({json.dumps(values)})) ({numbers}).value = value')
  await tab.run("$('text').value = ''; $('text').focus()")
  await tab.type(prompt)
  await tab.press(*ENTER, ctrl=True)


async def answers(tab) -> list[dict]:
  """What the columns show at the end: text, the paths that its marks name, title, status and error."""
  await tab.wait_for(DONE)
  script = """sides.filter(side => !side.box.hidden).map(({name, text, title, status, error}) => {
    const copy = text.cloneNode(true)
    const paths = [...copy.querySelectorAll('b')].map(mark => (mark.remove(), Number(mark.textContent)))
    const given = copy.querySelector('.given')?.textContent
    const lit = levels.map(({cells}) => cells.flatMap((cell, i) => cell.classList.contains(name) ? [i] : []))
    const before = levels[0].cells.flatMap((cell, i) => cell.classList.contains(`was-${name}`) ? [i] : [])
    return {text: copy.textContent, paths, given, lit, before, title: title.textContent, status: status.textContent,
      error: error.hidden ? '' : error.textContent}
  })"""
  return await tab.run(script)


def asked(server, **fields) -> dict:
  """The choice of the API for the same request."""
  body = {'model': 'run', 'prompt': PROMPT, 'temperature': 1, 'seed': 0} | fields
  status, answer = server.ask(body)
  assert status == 200, answer
  return answer['choices'][0]


def chat(server, messages: list[dict]) -> str:
  """The answer of the API to a conversation."""
  body = {'model': 'run', 'messages': messages, 'temperature': 1, 'seed': 0, 'max_tokens': 8}
  with contextlib.closing(server.connect()) as connection:
    connection.request('POST', '/v1/chat/completions', json.dumps(body), serving.HEADERS)
    return json.loads(connection.getresponse().read())['choices'][0]['message']['content']


def test_an_answer_streams_and_lights_the_paths_that_the_api_reports(server, tmp_path):
  async def use():
    async with page(server, tmp_path) as tab:
      await tab.run('window.lengths = new Set()')
      watch = 'new MutationObserver(() => lengths.add(sides[0].text.textContent.length))'
      await tab.run(f'{watch}.observe(sides[0].text, {{childList: true}})')
      await send(tab, max_tokens=60, reroute_every=16)
      shown = await answers(tab)
      scores = await tab.run("[...$('ranking').children].map(row => row.textContent)")
      return *shown, await tab.run('lengths.size'), scores

  shown, num_lengths, scores = asyncio.run(use())
  right = asked(server, max_tokens=60, reroute_every=16, router_scores=4)
  paths = right['paths']
  assert shown['text'] == PROMPT + right['text'] and num_lengths > 5
  assert shown['paths'] == paths and len(paths) > 1
  a, b = divmod(paths[-1], 2)
  assert shown['lit'] == [[paths[-1]], [0], [a], [b]]
  assert shown['before'] == sorted({*paths[:-1]})
  assert shown['title'].startswith(f'Path {paths[-1]} (a={a}, b={b})') and '60 tokens' in shown['status']
  assert [row.split(' (')[0] for row in scores] == [f'Path {score["path"]}' for score in right['router_scores']]
  assert [row.split(')')[1] for row in scores] == [f'{score["score"]:.2f}' for score in right['router_scores']]


def test_two_paths_answer_side_by_side_and_fit_into_a_narrow_window(server, tmp_path):
  async def use():
    async with page(server, tmp_path, 400) as tab:
      await tab.run("$('compare').click()")
      await send(tab, 'W' * 300, max_tokens=40, **{'path-a': '2', 'path-b': '1'})
      shown = await answers(tab)
      widths = []
      for width in (400, 1280):
        await tab.show(width)
        widths.append(await tab.run('[document.documentElement.scrollWidth, innerWidth]'))
      tops = await tab.run('sides.map(side => side.box.getBoundingClientRect().top)')
      colours = []
      for dark in (False, True):
        await tab.show(400, dark=dark)
        script = "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name])"
        colours.append(await tab.run(script))
      return shown, widths, tops, colours

  shown, widths, tops, (light, dark) = asyncio.run(use())
  for side, path in zip(shown, (2, 1), strict=True):
    assert side['text'] == 'W' * 300 + asked(server, prompt='W' * 300, path=path, max_tokens=40)['text']
    assert side['lit'][0] == side['paths'] == [path]
  assert all(scrolled <= inner for scrolled, inner in widths) and tops[0] == tops[1]
  assert light[0] != dark[0] and light[1] != dark[1]


def test_the_keyboard_reaches_every_control_and_stops_an_answer(server, tmp_path):
  async def use():
    async with page(server, tmp_path) as tab:
      await tab.run("document.querySelector('[name=mode]').focus()")
      reached, outlines = [], []
      for _ in range(12):
        script = '[document.activeElement.name || document.activeElement.id, getComputedStyle(document.activeElement)'
        name, outline = await tab.run(f'{script}.outlineStyle]')
        reached.append(name)
        outlines.append(outline)
        await tab.press(*TAB)
      await send(tab, max_tokens=900)
      await tab.wait_for("sides[0].text.querySelector('b') != null")
      await tab.press(*ESCAPE)
      stopped = await answers(tab)
      focus = [await tab.run('document.activeElement.id')]
      await tab.run("$('send').focus()")
      for focused in ('stop', 'send'):  # after Enter on Send, and then on Stop
        await tab.press(*ENTER)
        await tab.wait_for(f'document.activeElement.id == "{focused}"')
        focus.append(focused)
      return reached, outlines, *stopped, *await answers(tab), focus

  reached, outlines, stopped, stopped_again, focus = asyncio.run(use())
  numbers = ['max_tokens', 'temperature', 'top_p', 'top_k', 'seed', 'reroute_every']
  assert reached[:11] == ['mode', 'text', 'path-a', 'compare', *numbers, 'send'] and set(outlines[1:11]) == {'solid'}
  assert focus == ['text', 'stop', 'send']
  for answer in (stopped, stopped_again):
    assert answer['status'].startswith('Stopped after ') and not answer['error']
  serving.wait_for(lambda: server.measured('dipaco_active_texts') == 0, 10)


def test_errors_are_the_servers_and_texts_are_no_html(server, tmp_path):
  markup = '<img src=x onerror="document.title=1"><b>bold</b>&amp;'

  async def use():
    async with page(server, tmp_path) as tab:
      await send(tab, markup, max_tokens=8)
      shown = await answers(tab)
      await send(tab, max_tokens=5000)
      refused = await answers(tab)
      (problem,) = tab.problems
      assert '400' in problem
      tab.problems.clear()
      await send(tab, max_tokens=8)
      again = await answers(tab)
      return *shown, *refused, *again, await tab.run("[document.title, document.querySelectorAll('img').length]")

  shown, refused, again, found = asyncio.run(use())
  assert shown['text'].startswith(markup) and found == ['run', 0]
  _, expected = server.ask({'model': 'run', 'prompt': PROMPT, 'max_tokens': 5000})
  assert refused['error'] == expected['error']['message'] and not refused['lit'][0]
  assert not again['error'] and again['text'] == PROMPT + asked(server, max_tokens=8)['text']


def test_a_conversation_grows_and_stays_on_its_path(server, tmp_path):
  async def use():
    async with page(server, tmp_path) as tab:
      await tab.run("$('ask').elements.mode[1].click()")
      shown = []
      for message in (PROMPT, '12345'):
        await send(tab, message, max_tokens=8)
        shown += await answers(tab)
      messages = await tab.run('sides[0].messages')
      await tab.run("$('clear').click()")
      await tab.wait_for("sides[0].text.textContent == ''")
      return *shown, messages, await tab.run('sides[0].messages.length')

  first, second, messages, num_left = asyncio.run(use())
  assert [message['content'] for message in messages[::2]] == [PROMPT, '12345'] and num_left == 0
  assert [message['role'] for message in messages] == ['user', 'assistant'] * 2
  assert [message['content'] for message in messages[1::2]] == [chat(server, messages[:1]), chat(server, messages[:3])]
  assert second['text'] == f'You: {PROMPT}\n{messages[1]["content"]}\n\nYou: 12345\n{messages[3]["content"]}'
  assert first['paths'] * 2 == second['paths'] and second['lit'][0] == first['lit'][0] == first['paths']


def test_a_wrong_key_is_refused_and_no_key_is_stored(server, tmp_path):
  async def use():
    async with browser.opened(tmp_path) as tab:
      await tab.open(f'http://127.0.0.1:{server.port}/')
      await tab.wait_for("document.activeElement.id == 'key-value'")
      await tab.type('another key')
      await tab.press(*ENTER)
      await tab.wait_for("performance.getEntriesByType('resource').length == 2")
      refused = await tab.run("[$('main').hidden, $('about').textContent]")
      await tab.wait_for("document.activeElement.id == 'key-value'")
      await tab.type(serving.KEY)
      await tab.press(*ENTER)
      await tab.wait_for("!$('main').hidden")
      return refused, await tab.run('[localStorage.length, sessionStorage.length, document.cookie, location.search]')

  (is_hidden, message), stored = asyncio.run(use())
  assert is_hidden and message.startswith('the key is missing or wrong') and stored == [0, 0, '', '']
